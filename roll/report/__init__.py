"""`roll report`: the page of a run, one HTML file that opens offline, made from the files of the run."""
