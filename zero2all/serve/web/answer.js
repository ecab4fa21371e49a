// One answer while it is written: the request, what has come of it, and how fast.

import { ServerError, stream } from './api.js';
import { whole } from './format.js';
import { state } from './state.js';
import { Clusters, readTokens } from './tokens.js';
import { t } from './words.js';

const ALTERNATIVES = 8;
const LARGEST_SEED = 2 ** 31 - 1;

// A stop string per line; \n and \t stand for what cannot be typed in a line.
const stops = (text) => text.split('\n').filter(Boolean).map((line) => line.replaceAll('\\n', '\n').replaceAll('\\t', '\t'));

export class Answer {
	constructor(prompt = null) {
		this.prompt = prompt; // the text it continues, where that is known
		this.text = '';
		this.thought = '';
		this.calls = [];
		this.clusters = null; // where probabilities were asked for
		this.state = 'waiting'; // writing, then stop, length, stopped or failed
		this.failure = null; // {key, values} of the words for what went wrong
		this.dropped = 0; // messages that the model had no room for
		this.usage = null;
		this.asked = performance.now();
		this.controller = new AbortController();
		this.seed = state.settings.seed === '' ? Math.floor(Math.random() * LARGEST_SEED) : state.settings.seed;
	}

	get isOver() {
		return !['waiting', 'writing'].includes(this.state);
	}

	// In the language that the page has now.
	get error() {
		return this.failure && t(this.failure.key, this.failure.values);
	}

	get isTooLong() {
		return /TooLong$/.test(this.failure?.key);
	}

	// `content` is {messages} or {prompt}.
	body(model, content) {
		const { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens, stop } = state.settings;
		const body = { model: model.id, ...content, temperature, top_k, top_p, min_p, repetition_penalty, max_tokens, seed: this.seed };
		Object.assign(body, { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
		if (content.messages) body.truncation = 'auto';
		if (content.messages && state.settings.tools && model.z2a?.tools?.length) body.tools = model.z2a.tools;
		if (stops(stop).length) body.stop = stops(stop);
		if (state.probabilities) Object.assign(body, content.messages ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES });
		return body;
	}

	// Never fails: an error is a part of the answer, as is what was written before it.
	async write(model, content, onChange) {
		const path = content.messages ? 'v1/chat/completions' : 'v1/completions';
		if (state.probabilities) this.clusters = new Clusters();
		try {
			for await (const message of stream(path, this.body(model, content), this.controller.signal)) {
				this.take(message);
				onChange();
			}
			if (!this.isOver) this.state = 'stop';
		} catch (error) {
			this.state = error.name === 'AbortError' ? 'stopped' : 'failed';
			if (error.key === 'tooLong') this.failure = { key: content.messages ? 'messageTooLong' : 'textTooLong', values: { max: whole(model.z2a.max_len) } };
			else if (error instanceof ServerError) this.failure = error;
			else if (this.state === 'failed') {
				this.failure = { key: 'pageFailed', values: { message: error.message } };
				console.error(error);
			}
		}
		this.clusters?.close();
		onChange();
	}

	take({ choices, usage, dropped_messages: dropped = 0 }) {
		if (usage) this.usage = usage;
		this.dropped = dropped;
		const [choice] = choices ?? [];
		if (!choice) return;
		const { content, reasoning_content: thought = '', tool_calls: calls = [] } = choice.delta ?? {};
		const text = content ?? choice.text ?? '';
		const tokens = readTokens(choice.logprobs);
		this.clusters?.add(tokens);
		if (text || thought || calls.length || tokens.length) {
			this.last = performance.now();
			this.first ??= { at: this.last, tokens: usage?.completion_tokens };
			this.state = 'writing';
		}
		this.text += text;
		this.thought += thought;
		this.calls.push(...calls);
		if (choice.finish_reason) this.state = choice.finish_reason;
	}

	stop() {
		this.controller.abort();
	}

	// Seconds to the first token, tokens per second, tokens of the context that are in use; null: not known yet.
	get figures() {
		const { first, usage, last } = this;
		return {
			toFirst: first ? (first.at - this.asked) / 1000 : null,
			perSecond: first && usage ? this.rateSince(first) ?? this.rateSince({ at: this.asked, tokens: 0 }) : null,
			inContext: usage?.total_tokens ?? null,
		};
	}

	// Counted from the first token on; an answer that came in one piece has no such time, and counts from the question.
	rateSince({ at, tokens }) {
		const seconds = (this.last - at) / 1000;
		const count = this.usage.completion_tokens - tokens;
		return seconds > 0 && count > 0 ? count / seconds : null;
	}

	// [{text, start, cluster}], or null where there are no probabilities to show.
	seen() {
		return this.clusters?.seenIn(this.text, this.prompt) ?? null;
	}
}
