# Codex in a folder of its own, which is its HOME, too. The reward says whether it wrote a file.
cd "$(mktemp -d)" || exit 1
export HOME=$PWD
endpoint='model_providers.run={name="run", wire_api="responses", base_url="'$OPENAI_BASE_URL'"}'
codex exec -m policy -c model_provider=run -c "$endpoint" --skip-git-repo-check \
  --dangerously-bypass-approvals-and-sandbox "Write hi to hello.txt" </dev/null >&2
if [ -f hello.txt ]; then echo 1; else echo 0; fi
