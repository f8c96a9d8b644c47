# ruff: noqa: E501
"""Chat templates in the forms that models use, written for the tests, and the conversations they are tried on."""

TEMPLATES = {
    "chatml": """{%- for m in messages -%}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""",
    "chatml, system by default, tool calls": """
{%- if messages[0].role == 'system' %}{% set head = messages[0]['content'] %}{% set talk = messages[1:] %}
{%- else %}{% set head = 'You are helpful.' %}{% set talk = messages %}{% endif %}
{{- '<|im_start|>system\n' + head }}
{%- if tools %}
    {{- '\n\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\nCall with <tool_call>{"name": ..}</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in talk %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or talk[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson(ensure_ascii=True, sort_keys=true) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""",
    "headers, dates": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}
    {%- else %}{% set date_string = '1 Jan 2000' %}{% endif %}
{%- endif %}
{%- set first = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n\n' + first }}
{%- if tools is not none %}
    {% for t in tools %}
    {{- t | tojson(indent=4) }}
    {{- "\n\n" }}
    {% endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
""",
    "[INST]": """{% if messages[0]['role'] == 'system' %}{% set talk = messages[1:] %}
{%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
{%- else %}{% set talk = messages %}{% set system = '' %}{% endif %}
{%- for message in talk %}{% if message['role'] not in ['user', 'assistant', 'tool'] %}
{{ raise_exception('unknown role ' + message['role']) }}{% endif %}
{%- set content = (system if loop.first else '') ~ (message['content'] or '') %}
{%- if message['role'] == 'assistant' %}{{ ' ' ~ content.strip() ~ ' ' ~ eos_token }}
{%- else %}{{ bos_token ~ '[INST] ' ~ content.strip() ~ ' [/INST]' }}{% endif %}{% endfor %}""",
    "turns": """{{ bos_token }}{% set ns = namespace(system='') %}
{% for message in messages %}
{% if message['role'] == 'system' %}{% set ns.system = message['content'] | trim + '\n\n' %}{% continue %}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + (ns.system if role == 'user' else '') }}{{ (message['content'] or '') | trim }}<end_of_turn>
{% if role == 'user' %}{% set ns.system = '' %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
""",
    "thinking": """{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for m in messages[::-1] %}
    {%- set at = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and m.role == 'user' and not (m.content.startswith('<tool_response>')) %}
        {%- set ns.searching = false %}{% set ns.last = at %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content or '' %}{% set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>' ~ call.name ~ (call.arguments if call.arguments is string else call.arguments | tojson) }}
            {{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
        {{- '<tool_response>' + m.content + '</tool_response>' if m.role == 'tool' else m.content }}{{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}
    {%- elif enable_thinking is defined %}{{- '<think>\n' }}{% endif %}
{%- endif %}
""",
    "generation marks, roles as tokens": """{% set greeting %}{{ 'Hello ' ~ (name | default('you')) | upper }}{% endset %}
{{- greeting | replace('H', 'h') -}}
{% for message in messages %}
    {% set kept = 'outside' %}
    {%- if message['role'] == 'assistant' -%}
        <|assistant|>
        {%- generation %}{% set kept = 'inside' %}
{{ message['content'] }}{{ eos_token }} {{ kept }}
        {%- endgeneration -%}
    {%- else -%}
        {{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
    {%- endif -%}{{ kept }}
    {% if loop.index > 20 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt -%}{% generation %}<|assistant|>
{% endgeneration -%}{% endif -%}""",
    "macros, blocks": """{%- macro part(m, i) -%}
{%- for key, value in m.items() | sort -%}{{ i }}:{{ key }}={{ value | string | indent(2) | trim }};{%- endfor -%}
{%- endmacro -%}
{%- block talk scoped -%}
{%- for m in messages | rejectattr('role', 'equalto', 'system') | list -%}
{{ part(m, loop.index) }}{{ loop.cycle('<|im_end|>', '<|eot_id|>') }}{{ '%s of %d' | format(loop.index, messages | length) }}
{% endfor -%}
{%- endblock -%}
{%- filter upper -%}{{ messages | map(attribute='role') | unique | join(', ') }}{%- endfilter %}
{# bos, eos and what is not set: #}{{ bos_token is defined }}{{ pad_token is defined }}{{ documents is none }}{{ tools is none }}
{% raw %}{{ not a template }}{% endraw %} {{ messages | selectattr('content', 'defined') | list | length }}""",
}

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
