"""The network families: each says what the target, the condition and the read-out are; the core does the rest."""
