// Talking to the board's server.

async function ask(path, options) {
	const reply = await fetch(path, options);
	if (reply.ok) return reply;
	let message = `${reply.status} ${reply.statusText}`;
	try {
		message = (await reply.json()).error ?? message;
	} catch {} // not JSON: the status has to do
	throw Object.assign(new Error(message), { status: reply.status });
}

const query = (values) => new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== ''));
export const link = (path, values) => `api/${path}?${query(values)}`;
export const get = async (path, values) => (await ask(link(path, values))).json();

const KINDS = { f32: Float32Array, f64: Float64Array };

// The curves asked for: facts, and columns as typed arrays over the reply.
export async function curves(queries) {
	const body = JSON.stringify({ queries });
	const reply = await ask('api/curves', { method: 'POST', body, headers: { 'Content-Type': 'application/json' } });
	const buffer = await reply.arrayBuffer();
	const length = new DataView(buffer).getUint32(0, true);
	const heading = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
	let offset = 4 + length;
	for (const curve of heading) {
		for (const [name, kind, count] of curve.columns) {
			const Kind = KINDS[kind];
			curve[name] = new Kind(buffer, offset, count);
			offset += Math.ceil((count * Kind.BYTES_PER_ELEMENT) / 8) * 8;
		}
	}
	return heading;
}

// One stream for this tab, closed while it is hidden: browsers allow six connections to one host. On return the first
// message brings the present versions, so nothing is missed.
export class Live {
	constructor(onMessage, onLine) {
		Object.assign(this, { onMessage, onLine, runs: [], list: 0 });
		document.addEventListener('visibilitychange', () => this.open());
	}

	follow(runs, list) {
		Object.assign(this, { runs, list });
		this.open();
	}

	open() {
		this.source?.close();
		this.source = null;
		if (document.hidden) return;
		const values = new URLSearchParams({ list: this.list });
		for (const id of this.runs) values.append('run', id);
		const source = (this.source = new EventSource(`api/stream?${values}`));
		source.onopen = () => this.onLine(true);
		source.onmessage = (event) => {
			const message = JSON.parse(event.data);
			this.list = message.list;
			this.onMessage(message);
		};
		source.onerror = () => {
			this.onLine(false);
			// The browser tries again by itself after a broken line, but not after a refusal.
			if (source.readyState === EventSource.CLOSED && source === this.source) setTimeout(() => this.open(), 3000);
		};
	}
}
