// Talking to the server, in OpenAI's forms.

import { t } from './words.js';

const [UNREACHABLE, CUT] = [0, 1]; // instead of a status
const KNOWN = { [UNREACHABLE]: 'unreachable', [CUT]: 'cut', 401: 'needsToken', 413: 'tooLarge', 429: 'busy', loading: 'loadingModel', draining: 'ending', context_length_exceeded: 'tooLong' };

// An error to show: in the words of the page where its kind is known, else with the server's.
export class ServerError extends Error {
	constructor(status, { message = '', code = '' } = {}) {
		const key = KNOWN[code] ?? KNOWN[status] ?? (status < 500 ? 'refused' : 'broken');
		super(t(key, { message }));
		Object.assign(this, { status, key, values: { message } });
	}
}

async function ask(path, options) {
	let reply;
	try {
		reply = await fetch(path, options);
	} catch (error) {
		throw error.name === 'AbortError' ? error : new ServerError(UNREACHABLE);
	}
	if (reply.ok) return reply;
	let error = { message: `${reply.status} ${reply.statusText}` };
	try {
		error = (await reply.json()).error;
	} catch {} // not in the form of an error: the status has to do
	throw new ServerError(reply.status, error);
}

export const get = async (path) => (await ask(path, { cache: 'no-store' })).json();
const posted = (body, signal) => ({ method: 'POST', body, headers: { 'Content-Type': 'application/json' }, signal });
export const post = async (path, body) => (await ask(path, posted(body))).json();

// The messages of a stream as they arrive, until its end is announced.
export async function* stream(path, body, signal) {
	const reply = await ask(path, posted(JSON.stringify(body), signal));
	const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = '';
	for (;;) {
		const { value, done } = await next(reader);
		if (done) throw new ServerError(CUT);
		const lines = (rest + value).split('\n');
		rest = lines.pop();
		for (const line of lines) {
			if (!line.startsWith('data:')) continue;
			const data = line.slice(5).trim();
			if (data === '[DONE]') return;
			const message = JSON.parse(data);
			if (message.error) throw new ServerError(500, message.error);
			yield message;
		}
	}
}

async function next(reader) {
	try {
		return await reader.read();
	} catch (error) {
		throw error.name === 'AbortError' ? error : new ServerError(CUT);
	}
}
