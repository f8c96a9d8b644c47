# bash with curl: two questions, of which the second goes on from the first. The last line is the reward.
row=$(cat)
question=$(sed 's/.*"input": "\([^"]*\)".*/\1/' <<<"$row")
ask() {
  curl -sf "$OPENAI_BASE_URL/chat/completions" -H 'content-type: application/json' -d "{\"messages\": [$1]}"
}
first="{\"role\": \"user\", \"content\": \"$question\"}"
reply=$(ask "$first" | sed 's/.*"message": \({.*}\), "finish_reason".*/\1/') || exit 1
second=$(ask "$first, $reply, {\"role\": \"user\", \"content\": \"Sure?\"}") || exit 1
echo 0.$((${#second} % 2))
