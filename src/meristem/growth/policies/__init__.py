"""The policies: each decides what is born or leaves, from its own state and what was measured."""
