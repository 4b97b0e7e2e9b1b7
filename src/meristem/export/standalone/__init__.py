"""Files that exported folders carry as they are: each stands alone, and imports torch and transformers only."""
