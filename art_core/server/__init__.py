"""The GPU machine's side: one process that serves and trains for clients anywhere.

It holds one `LocalBackend`, answers for all its models in OpenAI's shape on one port, and keeps
what it was asked for in a ledger, so that a job survives its client and the server's own end.
"""
