"""Reads built data sets in the planned order; `input_pipeline` is its public interface."""
