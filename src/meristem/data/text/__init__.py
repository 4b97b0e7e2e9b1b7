"""Text: documents from files, their tokens in shards, and a sampler's view of them."""
