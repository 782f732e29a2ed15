"""The two stages of every method: from images to a finished bundle."""
