"""The files of a data set: records, chunk index, columns and checksums; and how it is opened."""
