// What is looked at and how: all of it is in the address, so that a link shows the same picture.

const DEFAULTS = {
	runs: [], // ids, in the order of their colours
	base: '', // id of the baseline
	diff: false,
	x: 'step',
	smooth: 'ema:10', // ema:width
	ylog: false,
	xlog: false,
	robust: false, // leave out extremes when choosing the y range
	zoom: null, // [from, to] on the x axis
	q: '', // metric search
	shut: [], // groups that are folded
	wide: '', // key of the enlarged chart
	theme: '',
	lang: '',
};

const listeners = [];
export const state = { ...DEFAULTS };
const isSame = (a, b) => JSON.stringify(a) === JSON.stringify(b);

export function readAddress() {
	const given = new URLSearchParams(location.hash.slice(1));
	for (const [name, usual] of Object.entries(DEFAULTS)) {
		const text = given.get(name);
		if (text === null) state[name] = usual;
		else if (name === 'zoom') state.zoom = readZoom(text);
		else if (Array.isArray(usual)) state[name] = text.split(',').filter(Boolean).map(decodeURIComponent);
		else state[name] = usual === false ? text === '1' : text;
	}
	if (!/^(step|tokens|time|flops)$/.test(state.x)) state.x = DEFAULTS.x;
	if (!/^(none|ema:\d+)$/.test(state.smooth)) state.smooth = DEFAULTS.smooth;
}

function readZoom(text) {
	const range = text.split('~').map(Number);
	return range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
}

// Items of a list are encoded twice: once as an item, once as a part of the address.
function address() {
	const words = Object.keys(DEFAULTS).filter((name) => !isSame(state[name], DEFAULTS[name])).map((name) => {
		const value = state[name];
		let text = value === true ? '1' : String(value);
		if (name === 'zoom') text = value.map((number) => Number(number.toPrecision(8))).join('~');
		else if (Array.isArray(value)) text = value.map((item) => encodeURIComponent(item).replaceAll('%2F', '/')).join();
		return `${name}=${encodeURIComponent(text).replace(/%(2F|3A|2C)/g, decodeURIComponent)}`;
	});
	return '#' + words.join('&');
}

// Change some of it; listeners get the names of what really changed.
export function change(values) {
	const before = { ...state };
	Object.assign(state, values);
	tell(before);
}

function tell(before) {
	const changed = Object.keys(state).filter((name) => !isSame(state[name], before[name]));
	if (!changed.length) return;
	history.replaceState(null, '', address());
	for (const listener of listeners) listener(new Set(changed));
}

export const onChange = (listener) => listeners.push(listener);

addEventListener('hashchange', () => {
	const before = { ...state };
	readAddress();
	tell(before);
});
