"""Names of engines and of what a batch has besides features, and which crop evaluation takes.

Nothing is imported here, so that both engines can afford it.
"""

AUTO, ROWS, CHUNKS, TF_DATA = ENGINES = ('auto', 'rows', 'chunks', 'tf_data')

DROP_TEXT = 'drop_text'  # bool (b,); with caption_dropout > 0
MASK = 'mask'  # bool (b,); False for rows of zeros that stand for no record

# Evaluation sees the middle one of the three crops, which is the one centred on the image.
EVAL_CROP = 1
