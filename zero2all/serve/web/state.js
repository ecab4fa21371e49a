// What the person chose, kept in the browser. Theme and language may stand in the address instead, as on the board.

export const SAMPLING = {
	temperature: { usual: 0.7, min: 0, max: 2, step: 0.1 },
	top_k: { usual: 50, min: 0, max: 100000, step: 1 },
	top_p: { usual: 0.95, min: 0.01, max: 1, step: 0.01 },
	min_p: { usual: 0, min: 0, max: 1, step: 0.01 },
	repetition_penalty: { usual: 1, min: 0.1, max: 2, step: 0.05 },
	max_tokens: { usual: 256, min: 1, max: 1000000, step: 1 },
	seed: { usual: '', min: 0, max: 2147483647, step: 1 }, // '': another one for each answer
};
const USUAL = { ...Object.fromEntries(Object.entries(SAMPLING).map(([name, { usual }]) => [name, usual])), stop: '', system: '' };
const DEFAULTS = {
	mode: '', // chat or continue; '': what suits the model
	probabilities: false,
	conversation: '', // id of the one that is open
	settings: USUAL,
	theme: '',
	lang: '',
};
const KEPT = 'z2a-talk';

const listeners = [];
export const state = { ...DEFAULTS };

export function read(key) {
	try {
		return JSON.parse(localStorage.getItem(key));
	} catch {
		return null; // nothing is kept, or not by this page
	}
}

// Whether it could be kept: the browser may refuse, and its space may be full.
export function write(key, value) {
	try {
		localStorage.setItem(key, JSON.stringify(value));
		return true;
	} catch {
		return false;
	}
}

export function readState() {
	const kept = read(KEPT) ?? {};
	Object.assign(state, kept, { settings: { ...USUAL, ...kept.settings } });
	const given = new URLSearchParams(location.hash.slice(1));
	for (const name of ['lang', 'theme', 'mode']) if (given.get(name)) state[name] = given.get(name);
}

// Change some of it; listeners get the names.
export function change(values) {
	Object.assign(state, values);
	write(KEPT, state);
	for (const listener of listeners) listener(new Set(Object.keys(values)));
}

export const changeSetting = (name, value) => change({ settings: { ...state.settings, [name]: value } });
export const usualSettings = () => change({ settings: { ...USUAL } });
export const isUsual = () => JSON.stringify(state.settings) === JSON.stringify(USUAL);
export const onChange = (listener) => listeners.push(listener);
