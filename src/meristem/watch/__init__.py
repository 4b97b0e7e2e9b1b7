"""Looking at runs while they go on: on a page that follows them, or in a terminal."""
