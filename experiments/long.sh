#!/usr/bin/env bash
# The longer run of docs/results.md: several seeds, each judged before and after, and one table over them.
# Started again it goes on where it stopped.
#
#   bash experiments/long.sh [seeds] [epochs] [folder]
set -euo pipefail
seeds=${1:-3} epochs=${2:-60} folder=${3:-runs/long}
last=$(printf "e%03d" "$epochs") others=()
params=experiments/long.yaml

for seed in $(seq "$seeds"); do
  wcpipe run --params $params --set seed="$seed" --epochs "$epochs" --root "$folder-$seed" --keep last:1
  wcpipe evaluate --params $params --set seed="$seed" --epoch "$last" --root "$folder-$seed"
  [ "$seed" = 1 ] || others+=(--run "$folder-$seed/evaluation/$last.json")
done
wcpipe evaluate --params $params --epoch e000 --root "$folder-1"  # the base is the same for all seeds
wcpipe report --root "$folder-1" --before e000 --after "$last" "${others[@]}"
