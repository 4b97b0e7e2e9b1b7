"""The page of a run, or of several: one file with its data, its pictures and the little script that draws them."""
