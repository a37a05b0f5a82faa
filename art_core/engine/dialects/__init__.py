"""Other shapes of the same calls: OpenAI's responses and completions, Anthropic's messages.

Each is a translation: its request becomes the body of a chat completion, and what comes back takes
its shape again. So every call is sampled, recorded and trained in one way, whoever asked for it.
What can't be honoured is refused by name.
"""
