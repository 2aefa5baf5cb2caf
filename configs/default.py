"""The default run: S/2 on one accelerator, the base that every other configuration overrides.

    python -m train_lib.main --config=configs/default.py --workdir=W \\
        --config.data.dir=OUT/coyo11m_tfds/CONFIG/1.0.0

Any field can be set on the command line: `--config.batch_size=512`, `--config.model.name=B/2`.

The whole batch on one device takes 3.3 GB as compiled for a TPU v5e and 7.2 GB as compiled for a
CPU. With `--config.model.remat=dots --config.accumulate=4` a v5e takes as much and, by its
compiler's estimate, a fifth less time.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns all fields as a locked `ConfigDict`."""
    config = ml_collections.ConfigDict()

    config.seed = 0  # seed of weights, noise, times and the order of the data
    config.batch_size = 256  # samples of one step, over all hosts
    config.accumulate = 1  # parts of a batch, computed one after the other to save memory
    config.gradient_dtype = 'float32'  # or 'bfloat16': in which devices add up those of blocks
    config.num_steps = 400_000  # 9 to 13 epochs of 7.6 to 11.4 million samples
    config.ema_decay = 0.9999  # per step; evaluation and previews use the average

    # A step with a non-finite loss or gradient is skipped: it changes nothing and is counted.
    config.max_skipped_in_a_row = 10  # more mean that the weights are beyond recovery
    config.max_skipped = 100  # in all; more mean that the data or the learning rate is wrong

    config.data = data = ml_collections.ConfigDict()
    data.dir = ''  # folder of the built data set: .../coyo11m_tfds/CONFIG/1.0.0
    data.mix = ()  # instead of dir: ({'dir': A, 'weight': 3}, {'dir': B, 'where': 'score > 5'})
    data.stages = ()  # later weights of a mixture: ({'from': STEP, 'weights': (1, 1)},)
    data.chunk = 64  # records of one request, a multiple of 32: 64 records are 1.7 MB
    data.lanes = 16  # a multiple of the number of hosts, a divisor of batch_size
    data.window = 1024  # records shuffled together in a lane; by chunks they take 21 MB a lane
    data.text = ''  # '': the records' text; or a column's name; or shares: 'records:2,short:1'
    data.require_text = True  # False: a model without captions if the data set has no text
    data.caption_dropout = 0.1  # share of samples whose text is dropped, for guidance
    data.on_bad_records = 'stop'  # or 'skip': leave out damaged records and count them
    data.max_bad_fraction = 0.001  # share of a split's records that 'skip' may leave out
    data.engine = 'auto'  # 'rows', 'chunks' and 'tf_data' read the same batches
    data.verify = 'once'  # when to compare checksums; 'always': 3 us of CPU a sample; 'never'
    data.parallel_reads = 4  # chunks in flight a lane; with 0.1 s of latency, 40,000 samples/s
    data.prefetch = 2  # batches ready on the host: one to send, one to even out slow reads
    data.device_prefetch = 2  # batches on the devices: one in use, one arriving
    data.cache_dir = ''  # folder on a local disk that keeps what comes from gs:// or hf://
    data.cache_gb = 0.0  # size to which it may grow; what came first stays
    data.ram_budget_gb = 0.0  # limit for reading on a host; 0: half of its memory

    config.model = model = ml_collections.ConfigDict()
    model.kind = 'dit'  # or MODULE:CLASS, your own model: docs/training.md has an example
    model.name = 'S/2'  # preset, size and patch size: tiny, S, B, L or XL
    model.width = 0  # width of tokens; in this and the next three fields 0 is the preset's value
    model.depth = 0  # blocks
    model.num_heads = 0  # attention heads, a divisor of the width
    model.patch_size = 0  # side of the square of latent positions that makes a token
    model.mlp_ratio = 0.0  # hidden width of a block's MLP over the width; 0: 4
    model.dtype = 'bfloat16'  # or 'float32': dtype of the computation; weights are float32
    model.remat = ''  # recomputed in the backward pass: 'none', 'dots', 'full'; '': the preset's
    # 'pooled': the mean of a text's words; 'sequence': attention sees each of its tokens, too;
    # '': 'sequence' if records hold tokens.
    model.text = ''
    model.prediction = 'velocity'  # or 'latents': the last layer computes clean latents
    model.crops = 0  # distinct crops of an image; 0: those of the data set; 1: none
    model.attention = 'xla'  # or a fused kernel: 'cudnn' on NVIDIA GPUs, 'pallas' on TPUs
    model.unroll = 0  # blocks in one turn of the compiled loop; 0: the preset's value

    config.encoder = ''  # jax:FOLDER: a frozen encoder of tokens in the step; '': a learned table

    config.optimizer = optimizer = ml_collections.ConfigDict()
    optimizer.name = 'adamw'  # or 'muon': Muon for kernels of blocks, AdamW for the rest
    optimizer.learning_rate = 2e-4  # for AdamW, after the warm-up; see set_learning_rates
    optimizer.muon_learning_rate = 2e-4  # for Muon, whose updates are as large as AdamW's
    optimizer.warmup_steps = 5_000  # steps of linear increase from 0
    optimizer.schedule = 'cosine'  # after the warm-up: cosine (to 0), wsd or constant
    optimizer.weight_decay = 0.01  # applies to kernels only
    optimizer.b1 = 0.9  # AdamW, first moment
    optimizer.b2 = 0.99  # AdamW, second moment; less than usual: random times add noise
    optimizer.clip_norm = 1.0  # norm of the whole gradient

    config.flow = flow = ml_collections.ConfigDict()
    flow.logit_mean = 0.0  # mean of the logit-normal times; above 0 favours noisy times
    flow.logit_std = 1.0  # standard deviation of the logit-normal times

    config.init_from = ''  # WORKDIR or WORKDIR@STEP of another run: start with its weights
    config.init_average = True  # start with their moving average; False: with the last weights

    config.distributed = False  # call jax.distributed.initialize; TPU hosts find each other

    config.mesh = mesh = ml_collections.ConfigDict()
    mesh.data = -1  # devices that split only the batch; -1: all devices / fsdp
    mesh.fsdp = 1  # devices that also split the weights and the optimizer state

    config.preview = preview = ml_collections.ConfigDict()
    preview.count = 16  # pictures in a grid
    preview.split = 'validation'  # split whose first records are drawn
    preview.vae = ''  # decoder: a folder or a name on the hub; '': a linear map, 32 pixels
    preview.guidance = 4.0  # strength of classifier-free guidance; 1 is none
    preview.guidance_low = 0.0  # lowest time at which guidance acts; 0 is data
    preview.guidance_high = 1.0  # highest time at which guidance acts; 1 is noise
    preview.num_steps = 50  # steps from noise to data
    preview.sampler = 'euler'  # or 'heun': second order, twice the time a step
    preview.time_shift = 1.0  # above 1: more of the steps at noisy times

    config.log_every = 100  # steps over which logged metrics are averages

    # Intervals in steps; 0: never.
    config.eval_every = 5_000  # a pass over the validation split
    config.preview_every = 5_000  # a grid of pictures
    config.checkpoint_every = 2_500  # also at the end and on SIGTERM
    config.keep_checkpoints = 3  # the last three
    config.keep_every = 0  # also keep the checkpoints of multiples of this step; 0: none
    config.profile_steps = 0  # steps to profile, after the first ten of a process; 0: no profile

    config.requeue_status = 75  # exit status after a signal, before the run is complete

    # 'auto': the user's cache or, with several processes, `compiled` in the workdir; '': none.
    config.compilation_cache = 'auto'  # folder of compiled programs for later starts, also gs://

    config.wandb = wandb = ml_collections.ConfigDict()
    wandb.project = ''  # project of Weights & Biases, which gets the same as TensorBoard; '': none

    return config.lock()


def set_learning_rates(config: ml_collections.ConfigDict, width: int) -> None:
    """Sets the learning rates of a long run by the batch size and the width of the model.

    `--config.batch_size` changes the rates, unless the command line sets them.
    """
    # The rate is 1e-4 for 256 samples and a width of 1,152, as Peebles & Xie (2023) train DiT-XL/2.
    # It grows with the square root of the batch size (Malladi et al., arXiv:2205.10287, for AdamW;
    # their rule also changes b1 and b2, this one does not) and falls with the inverse of the width
    # (muP, which Zheng et al., arXiv:2505.15270, derive for DiT: for kernels between hidden layers,
    # here for all weights). In short runs of AdamW, the best rates of widths 64, 128 and 256 follow
    # the inverse of the width (docs/log.md); no run here has tested the root of the batch
    # size. Muon has the same rate, because its updates are as large as AdamW's. The rule gives
    # 2.8e-4 where MicroDiT-XL/2 (Sehwag et al., arXiv:2407.15811) takes 2.4e-4, with 2,048 samples.
    for name in ('learning_rate', 'muon_learning_rate'):
        samples = config.get_oneway_ref('batch_size').to_float()
        config.optimizer[name] = 1e-4 * (1152 / width) * (samples / 256) ** 0.5
