#!/bin/sh
# Compiles the numba kernels of corpus, tokenizer and pack into the package's cache, by building a corpus of a few lines:
# otherwise the first build of a user, and the first tests, wait for it. It also shows that the installation works.
set -eu
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for number in 1 2 3 4 5 6 7 8 9 10 11 12; do
    echo "{\"text\": \"Line $number: the river, a stone and a tree of the year 20$number. 第 $number 行：这是一条河，在树的旁边。\"}"
done > "$folder/lines.jsonl"
echo '[{"text": "The first of two elements."}, {"text": "The second one, which is longer."}]' > "$folder/array.json"
printf 'id,text\n1,"A row, with a comma."\n2,Another row of the table.\n' > "$folder/table.csv"

z2a() {
    if ! .venv/bin/z2a "$@" --work "$folder/work" > "$folder/said.txt" 2>&1; then
        cat "$folder/said.txt" >&2
        echo "z2a $1 failed on a few lines of text: the installation in .venv does not work." >&2
        exit 1
    fi
}

echo "Compiling kernels (about a minute the first time)"
z2a corpus build "lines=$folder/lines.jsonl:en" "array=$folder/array.json:en" "table=$folder/table.csv:en" \
    --clean.too_short.on false --valid-share 0.2 --accept-drops
z2a tokenizer train --vocab-size 275
z2a pack --encoder numba
