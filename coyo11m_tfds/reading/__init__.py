"""From planned reads to parsed batches: what `input_pipeline` is made of.

The engine `rows`, without TensorFlow:

    rows                batches out of local shards, gathered row by row
    row_plan            which rows the next batches have
    row_reader          where rows lie, and batches of them
    mapped_files        files mapped into memory
    framing             where records begin and end in them
    verified            which records are held against their checksums

The engine `chunks`, through tf.data:

    tf_engine           its pipelines
    process_settings    what has to be set before TensorFlow starts
    choices             which crop, whether a caption is dropped: in TensorFlow
    layout              the large values of a record, in a graph
    parser              serialized records to tensors
    padding             rows of zeros that fill batches up
    chunks              runs of records, read at their offsets
    lanes               one lane of the planned order: chunks, windows, parts of batches
    ordinary            data sets without a chunk index
    memory              what reading takes of the memory

Both:

    names               of what a batch has besides features
    record_layout       where values lie in a record
    bad_records         what to do about records that are damaged
    counter             how much is being read
    ahead               an iterator that a thread keeps ahead
    on_device           batches to `jax.Array`s

Programs use `input_pipeline`; nothing here is imported by this module.
"""
