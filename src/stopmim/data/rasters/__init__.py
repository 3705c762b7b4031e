"""Arrays in files: images of any number of channels and any type of number, one file per format."""
