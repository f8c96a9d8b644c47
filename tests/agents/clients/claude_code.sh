# Claude Code in a folder of its own, which is its HOME, too. It fails where a reply was cut. The reward says whether it
# wrote a file.
cd "$(mktemp -d)" || exit 1
export HOME=$PWD
claude -p "Write hi to hello.txt" --allowedTools Bash </dev/null >&2
if [ -f hello.txt ]; then echo 1; else echo 0; fi
