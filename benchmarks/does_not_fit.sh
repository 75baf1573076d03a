#!/usr/bin/env bash
# A 96-layer, 512-wide ViT in a process that may hold 2 GiB of data: it can't be trained end to end, nor with activation
# checkpointing; block by block it trains to the end and answers.   bash benchmarks/does_not_fit.sh [UPDATES] [FOLDER]
set -uo pipefail
updates=${1:-20}
out=${2:-$(mktemp -d)}
limit=$((2 * 1024 * 1024 * 1024))
network="vit-digits --layers 96 --width 512 --heads 8 --mlp 2048 --blocks 24 --batch-size 32 --updates $updates --warmup 2 --checkpoint-every 1000"
failed=0

# expect CODE TITLE COMMAND...: runs a command under the limit, shows its end and compares its exit code.
expect() {
  local code=$1 title=$2
  shift 2
  echo "== $title: diffusionblocks $*"
  prlimit --data=$limit diffusionblocks "$@" >"$out/log" 2>&1
  local found=$?
  tail -n 3 "$out/log" | cut -c 1-200
  echo "-> exit code $found, expected $code"
  [ "$found" -eq "$code" ] || failed=1
}

mkdir -p "$out"
# shellcheck disable=SC2086  # the options are several words
{
  diffusionblocks plan $network --budget 1.5GiB --methods end_to_end,end_to_end_checkpointed,blocks
  expect 2 "end to end" compare $network --methods end_to_end --out "$out/end_to_end"
  expect 2 "end to end, checkpointed" compare $network --methods end_to_end_checkpointed --out "$out/checkpointed"
  expect 0 "block by block" compare $network --methods blocks --out "$out/blocks"
}
du -sh "$out/blocks" | sed 's/\t.*/ of disk took what memory did not/'
[ "$failed" -eq 0 ] && echo "as expected: only the blocks fit"
exit $failed
