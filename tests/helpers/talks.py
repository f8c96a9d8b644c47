"""Chat templates in the forms that models use, written for the tests, and the conversations they are tried on."""

from pathlib import Path

FOLDER = Path(__file__).with_name("chat_templates")
TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": 'Adds <b>two</b> numbers & says "é" 日本',
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "number"}, "a": {"type": "number"}},
                "required": ["a"],
            },
        },
    }
]
USER, SYSTEM = {"role": "user", "content": " 1+1 = <br>?\n"}, {"role": "system", "content": 'Füge <b>"hinzu"</b>.\n'}
CONVERSATIONS = {
    "single": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "2 \n"}, {"role": "user", "content": "日本 'q' & 🧮"}],
    "thought": [
        USER,
        {"role": "assistant", "content": "<think>\none\n</think>\n\n two"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "\n<think>a</think>\n\nb", "reasoning_content": "carry"},
    ],
    "calls": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"b": "é<1>", "a": [1, None]}}}
            ],
        },
        {"role": "tool", "content": '{"sum": 2}', "name": "add"},
    ],
}
