"""Zero-shot tasks through lm-evaluation-harness (extra `eval`), with rows from the network or from local copies."""
