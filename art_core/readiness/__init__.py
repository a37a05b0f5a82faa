"""What a machine and a base model need before anything is served or trained: small facts, early.

Probes of chat templates, reading of configs, estimates of memory, and checks that raise the same
typed errors for the doctor, an engine and a trainer. Weights are never loaded.
"""
