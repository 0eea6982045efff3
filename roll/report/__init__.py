"""`roll report`, `roll watch`: the page of a run, a file that opens offline, made from the files of the run."""
