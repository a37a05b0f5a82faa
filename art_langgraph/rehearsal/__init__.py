"""The rehearsal of an agent before any training: a graph is played, and what happened is checked."""
