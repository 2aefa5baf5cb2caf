"""From planned reads to parsed batches: what `input_pipeline` is made of.

    process_settings    what has to be set before TensorFlow starts
    choices             which crop, whether a caption is dropped: in TensorFlow
    layout              where large values lie in a record
    parser              serialized records to tensors
    padding             rows of zeros that fill batches up
    chunks              runs of records, read at their offsets
    bad_records         what to do about records that are damaged
    lanes               one lane of the planned order: chunks, windows, parts of batches
    ordinary            data sets without a chunk index
    counter             how much is being read
    memory              what reading takes of the memory
    on_device           batches to `jax.Array`s

Programs use `input_pipeline`; nothing here is imported by this module.
"""
