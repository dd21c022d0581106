"""What each field of a request does, in a sentence: the part of docs/api.md that no schema knows.

Pure data. A test demands a sentence for each field of the schemas, and a field for each sentence.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.router.http.openai.sampling_fields import SAMPLING

REQUEST: Mapping[str, str] = {
    **SAMPLING,
    "add_generation_prompt": "The chat template ends with the beginning of an answer.",
    "add_special_tokens": "The tokenizer adds what the checkpoint puts around a text, usually a token at its "
    "beginning. Chat templates write such tokens themselves.",
    "bad_words": "Texts that are not generated: the last token of each is withheld where the others came before it.",
    "best_of": "So many answers are generated, at most 20, and the `n` with the highest mean log probability per token "
    "are returned, the best first. `usage` counts the tokens of all. Above `n` not for streams.",
    "cache_salt": "Prefixes are shared by requests of the same salt only. Letters, digits, `_`, `-`; at most 128.",
    "chat_template": "A jinja template in place of the model's, for a router with `--trust-request-chat-template`. It "
    "is rendered in a process of its own, with limits of time and memory.",
    "chat_template_kwargs": "Numbers, booleans and short strings for variables of the chat template. An error "
    "message says which variables may be set.",
    "continue_final_message": "The answer continues the last message. Implies that no generation prompt is added.",
    "detokenize": "false: the answer has token ids and empty texts. Stop strings are then refused.",
    "documents": "Objects of strings for a chat template that shows documents; others ignore them.",
    "echo": "The answer begins with the prompt; with `logprobs`, its tokens are reported too. With `max_tokens` 0 "
    "nothing is generated.",
    "goal_tpot_ms": "Milliseconds between two tokens, in place of the router's goal. See [goals](#goals-for-latency).",
    "goal_ttft_ms": "Milliseconds to the first token, in place of the router's goal. See [goals](#goals-for-latency).",
    "guided_choice": "`structured_outputs.choice` under its older name.",
    "guided_grammar": "`structured_outputs.grammar` under its older name.",
    "guided_json": "`structured_outputs.json` under its older name.",
    "guided_regex": "`structured_outputs.regex` under its older name.",
    "guided_whitespace_pattern": "`structured_outputs.whitespace_pattern` under its older name, with `guided_json`.",
    "include_reasoning": "false: reasoning is generated and counted, but not sent.",
    "include_stop_str_in_output": "The text ends with the stop string or stop token instead of before it.",
    "logprobs": "Chat: whether to report log probabilities. Completions: how many likely tokens to report beside each "
    "token, at most 5.",
    "max_completion_tokens": "Today's name of `max_tokens`.",
    "max_tokens": "The output ends after so many tokens. Clipped to what is left of the context. Chat without it: up "
    "to the end of the context.",
    "messages": "The conversation, see below.",
    "metadata": "At most 16 strings.",
    "model": "A name that `/v1/models` lists.",
    "n": "How many answers, at most 128 together with the number of prompts.",
    "parallel_tool_calls": "false: with `tool_choice` `required` there is one call. Otherwise it is up to the model.",
    "prediction": '`{"type": "content", "content": ...}`: what the answer may be like, as a text or text parts. '
    "It makes the answer faster and changes nothing of it. See [predictions](#predictions).",
    "priority": "An integer; where requests have to wait, the lower is served earlier.",
    "prompt": "A text, token ids, or a list of either; at most 128.",
    "prompt_cache_key": "A string.",
    "prompt_logprobs": "Log probabilities of the prompt's tokens and of so many likely ones; at most 20. Not for "
    "streams.",
    "thinking_token_budget": "Reasoning ends after so many tokens, and the answer begins; see "
    "[reasoning](#reasoning). `-1`: no bound.",
    "reasoning_effort": "Given to the chat template, with `enable_thinking` unless `chat_template_kwargs` has it.",
    "response_format": "`text`, `json_object`, or `json_schema` with a schema that the answer is valid by. See "
    "[structured answers](#structured-answers).",
    "return_timings": "`usage.timings` says where the request's time went (Baton's own).",
    "return_token_ids": "`prompt_token_ids` and `token_ids` in each choice, `prompt_token_ids` in its first event.",
    "return_tokens_as_token_ids": "Tokens in log probabilities are written `token_id:5`.",
    "safety_identifier": "A string.",
    "skip_special_tokens": "Special tokens are left out of the text.",
    "stop": "Up to 16 strings; the text ends before the first of them that appears.",
    "stream": "Server-sent events instead of one answer.",
    "stream_options": "See below.",
    "structured_outputs": "Exactly one of `json` (a schema), `regex`, `choice`, `grammar` and `json_object`. See "
    "[structured answers](#structured-answers).",
    "suffix": "The answer is what fits between the prompt and this text, where the tokenizer has fill-in-the-middle "
    "tokens; refused elsewhere.",
    "tool_choice": "`none`, `auto` (the default where there are tools), `required`, or a function by its name. See "
    "[tools](#tools).",
    "tools": "Functions that the model may call, at most 512.",
    "top_logprobs": "How many likely tokens to report beside each token, at most 20.",
    "truncate_prompt_tokens": "Only so many tokens of the prompt are used; -1: as many as leave room for the output.",
    "truncation_side": "left: the last tokens of the prompt are used; right: its first.",
    "user": "A string.",
}

RESPONSES: Mapping[str, str] = {
    **REQUEST,
    "conversation": 'The id of a conversation, alone or as `{"id": ...}`: its items come before `input`, and input and '
    "output are added to it. See [conversations](#conversations).",
    "include": "`message.output_text.logprobs`; values of tools other than functions are taken and give nothing.",
    "input": "A text, or items: messages of text and, of the user, `input_image` (a `data:` URL), `function_call`, "
    "`function_call_output` and `reasoning`. See [the Responses API](#the-responses-api).",
    "instructions": "The first message of the conversation, of the role `system`.",
    "max_output_tokens": "The output ends after so many tokens, reasoning included. Without it: up to the end of the "
    "context.",
    "metadata": "At most 16 strings, which the answer repeats.",
    "previous_response_id": "The id of a stored response: its conversation comes before `input`. See "
    "[stored responses](#stored-responses).",
    "prompt_cache_key": "A string, which the answer repeats.",
    "reasoning": "`effort`, which goes to the chat template like `reasoning_effort` of chat. `summary`, "
    "`generate_summary`, `context` and `mode` are ignored: reasoning is told as it is.",
    "safety_identifier": "A string, which the answer repeats.",
    "store": "Whether the response is stored. See [stored responses](#stored-responses).",
    "text": "`format`: `text`, `json_object`, or `json_schema` with a schema. `verbosity` is ignored.",
    "tool_choice": '`none`, `auto`, `required`, or `{"type": "function", "name": ...}`.',
    "tools": "Functions, at most 512. `web_search`, `image_generation` and a `namespace` with functions of its own, "
    "which agents offer unasked, are ignored; other tools are refused.",
    "truncation": "`disabled`.",
    "user": "A string, which the answer repeats.",
}

ANTHROPIC: Mapping[str, str] = {
    "max_tokens": "The output ends after so many tokens, thinking included. Clipped to what is left of the context.",
    "messages": "Messages of the roles `user`, `assistant` and `system`, with text or blocks. Anyone has `text`; the "
    "user `image` (`source` of the type `base64`) and `tool_result`; the assistant `thinking`, `redacted_thinking` "
    "(dropped) and `tool_use`. Other blocks are refused by name. "
    "A last message of the assistant is continued.",
    "model": "A name that `/v1/models` lists.",
    "output_config": "`effort`, which goes to the chat template, and `format`: `json_schema` with a schema that the "
    "answer is valid by.",
    "output_format": "`output_config.format` under its older name.",
    "stop_sequences": "Up to 16 strings; the text ends before the first of them that appears.",
    "stream": "Server-sent events instead of one answer.",
    "system": "A text, or blocks of text. A block that begins with `x-anthropic-billing-header:` is dropped.",
    "temperature": "0 to 2; 0: always the likeliest token.",
    "thinking": "`enabled`, `adaptive` and `between_tools` set `enable_thinking` for the chat template, `disabled` "
    "unsets it and leaves thinking out of the answer, as `display: omitted` does. `budget_tokens` is "
    "`thinking_token_budget`. Without the field the model does as it is used to.",
    "tool_choice": "`auto`, `any`, `tool` with a `name`, or `none`; with `disable_parallel_tool_use` there is one call "
    "for `any`.",
    "tools": "Functions with an `input_schema`, at most 512; tools of another `type` are refused.",
    "top_k": "Only so many of the likeliest tokens are sampled; 0 or -1: all.",
    "top_p": "Only the likeliest tokens that have this probability together are sampled.",
}

MESSAGE: Mapping[str, str] = {
    "content": 'A text, or a list of `{"type": "text", "text": ...}`, joined with newlines, and '
    '`{"type": "image_url", "image_url": {"url": "data:..."}}`.',
    "name": "Given to the chat template.",
    "reasoning": "Of an earlier answer: given to the chat template as `reasoning_content`.",
    "reasoning_content": "The same under its older name.",
    "role": "`developer` is `system`.",
    "tool_call_id": "Of a message of a `tool`: the call that it is the result of.",
    "tool_calls": "Of a message of the assistant: the calls of an earlier answer, as it had them.",
}

STREAM_OPTIONS: Mapping[str, str] = {
    "continuous_usage_stats": "With `include_usage`: every event has a `usage` with the tokens of its choice so far.",
    "include_usage": "One more event before the end, with `usage` and no choices.",
}
