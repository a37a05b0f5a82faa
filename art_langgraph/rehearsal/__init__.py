"""The rehearsal of an agent before any training: a graph is played, and what came of it checked."""
