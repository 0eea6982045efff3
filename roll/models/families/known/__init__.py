"""The families, one file each with a `ModelFamily` called FAMILY; `registry` finds every file of this folder."""
