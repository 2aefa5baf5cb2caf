"""The files of a data set (records, chunk index, columns, checksums), and how readers open it."""
