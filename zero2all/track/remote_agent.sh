export LC_ALL=C;
unset CDPATH TIME_STYLE QUOTING_STYLE BLOCK_SIZE LS_BLOCK_SIZE POSIXLY_CORRECT;
IFS= read -r mark;
IFS= read -r root;
if cd "$root" 2>/dev/null; then
    if [ -d metrics ]; then kind=run;
    elif [ -d runs ] && cd runs; then kind=runs;
    elif [ -f config.yaml ]; then kind=run;
    else kind=runs; fi;
    base=$PWD;
    printf "%s ready %s\n" "$mark" "$kind";
else
    printf "%s missing\n" "$mark"; exit 0;
fi;
listing() {
    if [ "$kind" = run ]; then set -- ./metrics ./config.yaml ./anneal.json;
    else set -- ./*/metrics ./*/config.yaml ./*/anneal.json; fi;
    find -L "$@" -type f "(" -name "*.jsonl" -o -name config.yaml -o -name anneal.json ")"
        -exec ls -lin -L {} +;
};
last=none;
while read -r request offset limit; do
    if [ "$request" = list ]; then
        if [ "$offset" = again ]; then last=none; fi;
        if cd "$base" 2>/dev/null; then now=$(listing 2>/dev/null); else printf "%s missing\n" "$mark"; exit 0; fi;
        if [ "$now" = "$last" ]; then printf "%s same\n" "$mark";
        else last=$now; printf "%s files\n%s\n%s end\n" "$mark" "$now" "$mark"; fi;
    else
        IFS= read -r name;
        size=-1; count=0;
        if [ -f "$name" ] && [ -r "$name" ]; then
            size=$({ wc -c <"$name"; } 2>/dev/null) || size=-1;
            size=$((${size:--1})); count=$((size - offset));
        fi;
        if [ "$count" -lt 0 ]; then count=0; fi;
        if [ "$count" -gt "$limit" ]; then count=$limit; fi;
        printf "%s piece %s %s\n" "$mark" "$size" "$count";
        if [ "$count" -gt 0 ]; then tail -c "+$((offset + 1))" "$name" 2>/dev/null | head -c "$count"; fi;
        printf "%s end\n" "$mark";
    fi;
done
