"""The chat template of the demo model, as jinja text. A message without tools is written as it always was.

Tools stand in the system message as one line each, `add(a: integer, b?: integer) - Add two numbers.`: a model of this
size has no use for the rest of a JSON schema. Calls are written as Hermes and Qwen write them, results are turns of the
user. `enable_thinking` begins the answer inside of a thought; thoughts of earlier answers are left out.
"""

from __future__ import annotations

from typing import Final

MAX_DESCRIPTION_CHARS: Final = 200

_MACROS: Final = """
{%- macro text(content) %}
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content or [] %}{{- part['text'] }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- macro kind(schema) %}
{%- if schema is not mapping %}{{- 'any' }}
{%- elif schema['enum'] %}{{- schema['enum'] | join('|') }}
{%- elif schema['type'] is string %}{{- schema['type'] }}
{%- elif schema['anyOf'] %}{{- kind(schema['anyOf'][0]) }}
{%- else %}{{- 'any' }}{%- endif %}
{%- endmacro %}
{%- macro signature(function) %}
{%- set parameters = function['parameters'] or {} %}
{{- function['name'] + '(' }}
{%- for name, schema in (parameters['properties'] or {}).items() %}
{{- ', ' if not loop.first }}{{- name + ('' if name in (parameters['required'] or []) else '?') + ': ' + kind(schema) }}
{%- endfor %}
{{- ')' }}
{%- if function['description'] %}{{- ' - ' + function['description'].strip().split('\\n')[0][:MAX_CHARS] }}{%- endif %}
{%- endmacro %}
{%- macro answer(content) %}
{{- content.split('</think>')[-1].lstrip('\\n') if '</think>' in content else content }}
{%- endmacro %}
{%- macro call(function) %}
{%- set arguments = function['arguments'] %}
{{- '<tool_call>\\n{"name": ' + function['name'] | tojson + ', "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endmacro %}
""".replace("MAX_CHARS", str(MAX_DESCRIPTION_CHARS))
_SYSTEM: Final = """
{%- set has_system = messages and messages[0]['role'] == 'system' %}
{%- if tools %}
{%- set system = text(messages[0]['content']) if has_system else '' %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + '# Tools\\n<tools>\\n' }}
{%- for tool in tools %}{{- signature(tool['function'] or tool) + '\\n' }}{%- endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- endif %}
"""
_MESSAGES: Final = """
{%- for message in messages %}
{%- if message['role'] == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message['content']) + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message['role'] == 'assistant' %}
{%- set said = answer(text(message['content'])) %}
{{- '<|im_start|>assistant\\n' + said }}
{%- for each in message['tool_calls'] or [] %}
{{- ('\\n' if said or not loop.first else '') + call(each['function'] or each) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (tools and has_system and loop.first) %}
{{- '<|im_start|>' + message['role'] + '\\n' + text(message['content']) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '') }}
{%- endif %}
"""
CHAT_TEMPLATE: Final = (_MACROS + _SYSTEM + _MESSAGES).lstrip()
