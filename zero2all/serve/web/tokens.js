// Tokens as the server names them, and the characters they make together: one character may take several tokens.

const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/i;
const encoder = new TextEncoder();

// A token of a completion is text, or bytes:\xe4\xb8 where it is no text by itself.
function named(name, logprob) {
	const hex = BYTES.exec(name)?.[1];
	const bytes = hex ? hex.slice(2).split('\\x').map((byte) => parseInt(byte, 16)) : [...encoder.encode(name)];
	return { bytes, logprob, text: hex ? null : name };
}

const given = ({ bytes, logprob }) => ({ bytes: bytes ?? [], logprob, text: decode(bytes ?? []) });

// Text of whole characters, or null.
function decode(bytes) {
	try {
		return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
	} catch {
		return null;
	}
}

// What one message of a stream says about its tokens: [{bytes, logprob, text, alternatives}].
export function readTokens(logprobs) {
	if (logprobs?.content) return logprobs.content.map((each) => ({ ...given(each), alternatives: each.top_logprobs.map(given) }));
	return (logprobs?.tokens ?? []).map((name, i) => ({
		...named(name, logprobs.token_logprobs[i]),
		alternatives: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => named(other, logprob)),
	}));
}

export const probability = ({ logprob }) => Math.min(1, Math.exp(logprob));
export const hex = (bytes) => bytes.map((byte) => byte.toString(16).toUpperCase().padStart(2, '0')).join(' ');

// Whether bytes do not end inside a character.
function isWhole(bytes) {
	for (let back = 1; back <= Math.min(3, bytes.length); back += 1) {
		const byte = bytes.at(-back);
		if (byte < 0x80) return true;
		if (byte >= 0xc0) return (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) <= back;
	}
	return true;
}

// Groups of tokens that make whole characters together, and where each begins in the text of all of them.
export class Clusters {
	constructor() {
		this.all = []; // {text, start, tokens, owner}
		this.text = '';
		this.open = []; // tokens that end inside a character
		this.skip = null; // how much of the text was there before the answer
	}

	add(tokens) {
		for (const each of tokens) {
			this.open.push(each);
			if (isWhole(this.open.flatMap(({ bytes }) => bytes))) this.close();
		}
	}

	// Also at the end of an answer, which may come in the middle of a character.
	close() {
		const text = new TextDecoder('utf-8', { ignoreBOM: true }).decode(Uint8Array.from(this.open.flatMap(({ bytes }) => bytes)));
		if (text) this.all.push({ text, start: this.text.length, tokens: this.open, owner: this });
		this.text += text;
		this.open = [];
	}

	// Those that are seen in the answer: [{text, start, cluster}], start counted in the answer. The first token of a
	// continuation may begin inside the prompt, and the last may reach into a stop string: both are cut to what is seen.
	// null where the tokens do not spell the answer. The prompt of a chat is not known.
	seenIn(answer, prompt = null) {
		if (!answer) return [];
		if (this.skip === null || !this.text.startsWith(answer, this.skip)) this.skip = this.found(answer, prompt);
		if (this.skip === null) return null;
		const seen = [];
		for (const cluster of this.all) {
			const from = Math.max(0, cluster.start - this.skip);
			const to = Math.min(answer.length, cluster.start - this.skip + cluster.text.length);
			if (from < to) seen.push({ text: answer.slice(from, to), start: from, cluster });
		}
		return seen;
	}

	found(answer, prompt) {
		for (let skip = 0; skip <= this.text.length; skip += 1) {
			if (this.text.startsWith(answer, skip) && (prompt === null || prompt.endsWith(this.text.slice(0, skip)))) return skip;
		}
		return null;
	}

	// What an alternative adds to the answer; null where it leads away from the prompt, in which its token begins.
	added(cluster, { text }) {
		const inside = this.text.slice(cluster.start, Math.max(cluster.start, this.skip));
		return text?.startsWith(inside) ? text.slice(inside.length) : null;
	}

	// The text before a cluster, where the answer continues `prompt`.
	before(cluster, prompt) {
		return prompt.slice(0, prompt.length - this.skip) + this.text.slice(0, cluster.start);
	}
}
