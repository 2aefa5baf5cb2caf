"""Checks that a text encoder loads here, that its tokenizer is the fast one, and how long it takes.

encoders.check_encoder('hf:google/gemma-3-270m', num_captions=11_000_000, seconds=120)
# [Finding('tokenizer', 'pass', 'GemmaTokenizer in Rust, 800,000 tokens/s'),
#  Finding('encoder', 'warn', 'hf:google/gemma-3-270m: ... 18 captions/s, slow: 170 hours ...')]
"""

from typing import Any

from coyo11m_tfds.checks import child, finding
from coyo11m_tfds.checks.finding import Finding

# Hours for all captions of the source, and what that is called.
_RATINGS = ((2, 'fast'), (24, 'good'))
_SLOW = 'slow'

_HURRY = (
    'use a machine with a GPU or TPU (jax: in place of hf: runs Gemma 3 on TPUs), spread the work '
    'over more machines, or take a smaller encoder'
)


def check_encoder(spec: str, num_captions: int, seconds: float) -> list[Finding]:
    """Loads an encoder in a process of its own and encodes some captions.

    Args:
        spec: see `text_encoders.make_encoder`.
        num_captions: of the source, to rate the speed by.
        seconds: that it may take.
    """
    try:
        program = ['-m', 'coyo11m_tfds.checks.try_encoder', spec]
        answer = child.ask(program, seconds, {'TF_CPP_MIN_LOG_LEVEL': '3', 'COYO11M_TRACEBACK': ''})
    except TimeoutError as error:
        mend = 'wait longer with --timeout, or download the model first: hf download NAME'
        return [finding.of_error('encoder', TimeoutError(f'{spec}: {error}'), mend)]
    except (ValueError, OSError) as error:
        return [finding.failed('encoder', f'{spec}: {error}')]
    if 'error' in answer:
        encoder = finding.failed('encoder', f'{spec}: {answer["error"]}')
    else:
        encoder = _rate(spec, answer, num_captions)
    return [*_judge_tokenizer(spec, answer), encoder]


def _judge_tokenizer(spec: str, answer: dict[str, Any]) -> list[Finding]:
    if 'tokenizer' not in answer:  # `jax:` has no other than that in Rust, `hash` needs none
        return []
    kind, rate = answer['tokenizer'], answer['tokens_a_second']
    facts = {'kind': kind, 'tokens_a_second': rate}
    if answer['is_fast']:
        return [finding.passed('tokenizer', f'{kind} in Rust, {rate:,.0f} tokens/s', **facts)]
    text = f'{kind} of {spec} is written in Python ({rate:,.0f} tokens/s), expected the one in Rust'
    mend = 'add its tokenizer.json to the model, or choose a model that has one'
    return [finding.failed('tokenizer', text, mend, **facts)]


def _rate(spec: str, answer: dict[str, Any], num_captions: int) -> Finding:
    rate = answer['captions_a_second']
    hours = num_captions / rate / 3600
    rating = next((name for most, name in _RATINGS if hours <= most), _SLOW)
    digits = 0 if rate >= 10 else 1
    time = f'{hours:,.1f} hours' if hours >= 1 else f'{3600 * hours:,.0f} s'
    text = (
        f'{spec} loads, embeddings of {answer["dim"]} numbers, {rate:,.{digits}f} captions/s here, '
        f'{rating}: {time} for {num_captions:,} captions'
    )
    facts = {'captions_a_second': rate, 'hours': hours, 'rating': rating, 'dim': answer['dim']}
    if rating == _SLOW:
        return finding.warned('encoder', text, _HURRY, **facts)
    return finding.passed('encoder', text, **facts)
