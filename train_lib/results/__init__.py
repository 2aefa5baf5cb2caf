"""What a run gives: pictures, their evaluation, and the files of an export."""
