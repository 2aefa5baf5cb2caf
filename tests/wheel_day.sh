#!/usr/bin/env bash
# A user's first day with the wheel alone, outside of the checkout; leaves what it tried in dist/.
#
#     PYTHON=python3.12 tests/wheel_day.sh
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH VIRTUAL_ENV
cd "$folder"

# Builds the wheel from the source distribution, which therefore has all that a build needs.
"${PYTHON:-python3}" -m venv tools
tools/bin/python -m pip install --quiet --constraint "$checkout/constraints.txt" build
rm -rf "$checkout/dist"
tools/bin/python -m build --outdir "$checkout/dist" "$checkout" > build.log || { cat build.log; exit 1; }

"${PYTHON:-python3}" -m venv user
make --directory "$checkout" torch VENV="$PWD/user"
user/bin/python -m pip install --quiet --no-compile --constraint "$checkout/constraints.txt" \
    "$(echo "$checkout"/dist/*.whl)[convert]"
user/bin/python -m pip check

# The README's commands, with fewer steps.
mkdir day
cd day
python=../user/bin/python
$python -m coyo11m_tfds.sample_data --out=SOURCE
$python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT --encoder=words
$python -m train_lib.main --config=small --workdir=W --config.data.dir=OUT/coyo11m_tfds/words/1.0.0 \
    --config.num_steps=20 --config.optimizer.warmup_steps=5
$python -m train_lib.draw --workdir=W --prompts='woman astronaut: dark skin tone' --out=drawn.png
test -s drawn.png
ls "$checkout"/dist/*
