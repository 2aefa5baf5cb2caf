"""The default run: S/2 on one machine, the base that every other configuration overrides.

    python -m train_lib.main --config=configs/default.py --workdir=W \\
        --config.data.dir=OUT/coyo11m_tfds/CONFIG/1.0.0

Any field can be set on the command line: `--config.batch_size=512`, `--config.model.name=B/2`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """All fields; a locked `ConfigDict`."""
    config = ml_collections.ConfigDict()

    config.seed = 0  # of weights, of noise and times, and of the order of the data
    config.batch_size = 256  # samples of one step, over all hosts
    config.accumulate = 1  # parts that a batch is computed in, one after the other, to save memory
    config.num_steps = 400_000  # 9 to 13 epochs of 7.6 to 11.4 million samples
    config.ema_decay = 0.9999  # a step; the weights that evaluation and previews use

    # A step whose loss or gradient is not finite is skipped: it changes nothing, but is counted.
    config.max_skipped_in_a_row = 10  # more are no bad batch but weights that are beyond recovery
    config.max_skipped = 100  # in all; more say that the data or the learning rate are wrong

    config.data = data = ml_collections.ConfigDict()
    data.dir = ''  # folder of the built data set: .../coyo11m_tfds/CONFIG/1.0.0
    data.chunk = 64  # records read at one offset, a multiple of 32: 1.7 MB repay a request to gs://
    data.lanes = 16  # hosts divide it, it divides batch_size: 16 records of a batch from each
    data.window = 1024  # records shuffled together in a lane; a lane takes 39 MB for it
    data.text = ''  # of the records; a column of `add_column`; or both: 'records:2,short:1'
    data.caption_dropout = 0.1  # share of samples whose text is dropped, for guidance
    data.on_bad_records = 'stop'  # or 'skip': leave out and count damaged records
    data.max_bad_fraction = 0.001  # of a split's records that 'skip' may leave out
    data.engine = 'auto'  # 'rows' of local files, 'chunks' fetched, 'tf_data': the same batches
    data.verify = 'once'  # checksums of rows; 'always': 3 us of a core a sample more; 'never'
    data.parallel_reads = 4  # chunks read at once in a lane: 64 make 40,000 samples/s 0.1 s away
    data.prefetch = 2  # batches ready on the host: one is sent, one evens out slow reads
    data.device_prefetch = 2  # batches ahead on the devices: one is used, one arrives meanwhile
    data.ram_budget_gb = 0.0  # for reading on a host, refused if more; 0: half of its memory

    config.model = model = ml_collections.ConfigDict()
    model.kind = 'dit'  # or MODULE:CLASS, a model of your own: docs/training.md has an example
    model.name = 'S/2'  # preset, size and patch size: tiny, S, B, L or XL
    model.width = 0  # of tokens; 0: as the preset says. So are the next three
    model.depth = 0  # blocks
    model.num_heads = 0  # of the attention; they divide the width
    model.patch_size = 0  # side of the square of latent positions that makes a token
    model.mlp_ratio = 0.0  # hidden layer of a block, in widths; 0: 4
    model.dtype = 'bfloat16'  # of the computation; weights are float32
    model.remat = 'none'  # computed again in the backward pass: none, all but dots, or full
    model.text = 'pooled'  # or 'sequence': attention sees the tokens too, where records hold them
    model.attention = 'xla'  # or 'cudnn': fused, for NVIDIA GPUs

    config.encoder = ''  # jax:FOLDER: frozen, encodes tokens in the step; '': a learned table

    config.optimizer = optimizer = ml_collections.ConfigDict()
    optimizer.name = 'adamw'  # or 'muon': for kernels of blocks, with AdamW for all else
    optimizer.learning_rate = 2e-4  # of AdamW, at the end of the warm-up
    optimizer.muon_learning_rate = 2e-4  # of Muon; its updates are as large as AdamW's
    optimizer.warmup_steps = 5_000  # steps of linear increase from 0
    optimizer.schedule = 'cosine'  # after the warm-up: cosine (to 0) or constant
    optimizer.weight_decay = 0.01  # of kernels alone
    optimizer.b1 = 0.9  # AdamW, first moment
    optimizer.b2 = 0.99  # AdamW, second moment; less than usual, for the noise of random times
    optimizer.clip_norm = 1.0  # of the whole gradient

    config.flow = flow = ml_collections.ConfigDict()
    flow.logit_mean = 0.0  # of the logit-normal times: more than 0 favours noisy times
    flow.logit_std = 1.0  # of the logit-normal times

    config.init_from = ''  # workdir of a run whose weights a new one begins with, or WORKDIR@STEP
    config.init_average = True  # with the moving average of those weights; False: with the last

    config.distributed = False  # call jax.distributed.initialize; a TPU finds its hosts itself

    config.mesh = mesh = ml_collections.ConfigDict()
    mesh.data = -1  # devices along which the batch alone is split; -1: what fsdp leaves
    mesh.fsdp = 1  # devices over which weights and optimizer state are split as well

    config.preview = preview = ml_collections.ConfigDict()
    preview.count = 16  # pictures in a grid
    preview.split = 'validation'  # whose first records are drawn
    preview.vae = ''  # that decodes: a folder or a name on the hub; '': a linear guess, 32 pixels
    preview.guidance = 4.0  # strength of classifier-free guidance; 1 is none
    preview.guidance_low = 0.0  # times between which guidance acts: 0 is data,
    preview.guidance_high = 1.0  # and 1 is noise
    preview.num_steps = 50  # from noise to data
    preview.sampler = 'euler'  # or 'heun': second order, twice the time a step
    preview.time_shift = 1.0  # more than 1 spends more of the steps at noisy times

    config.log_every = 100  # steps that a logged metric is the average of

    # Every so many steps; 0: never.
    config.eval_every = 5_000  # a pass over the validation split
    config.preview_every = 5_000  # a grid of pictures
    config.checkpoint_every = 2_500  # also at the end, and when SIGTERM comes
    config.keep_checkpoints = 3  # the last ones
    config.keep_every = 0  # and for ever those of every so many steps; 0: none
    config.profile_steps = 0  # steps to profile, after the first ten of a process; 0: no profile

    config.requeue_status = 75  # exit status of a run that a signal ended before it was complete

    config.wandb = wandb = ml_collections.ConfigDict()
    wandb.project = ''  # of Weights & Biases, which gets what TensorBoard gets; '': none

    return config.lock()
