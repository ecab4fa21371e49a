// Numbers for people: short, aligned, honest about what is not a number.

const UNITS = [[1e18, 'E'], [1e15, 'P'], [1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']];

export function number(value) {
	if (value === null || value === undefined || Number.isNaN(value)) return '–';
	if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
	const size = Math.abs(value);
	if (size === 0) return '0';
	if (size >= 1e4) return count(value);
	return (size < 1e-3 ? value.toExponential(2) : value.toPrecision(4)).replaceAll('-', '−');
}

export function count(value) {
	if (value === null || value === undefined || !Number.isFinite(value)) return '–';
	for (const [size, unit] of UNITS) {
		if (Math.abs(value) >= size) return `${trim(value / size)}${unit}`.replace('-', '−');
	}
	return Number.isInteger(value) ? String(value) : trim(value);
}

export const whole = (value) => (value === null || value === undefined ? '–' : Math.round(value).toLocaleString('en-US'));
const trim = (value) => String(Number(value.toPrecision(Math.abs(value) >= 100 ? 4 : 3)));

export function duration(seconds) {
	if (!Number.isFinite(seconds)) return '–';
	const sign = seconds < 0 ? '−' : '';
	const s = Math.abs(seconds);
	if (s < 60) return `${sign}${s < 10 ? trim(s) : Math.round(s)}s`;
	if (s < 3600) return `${sign}${Math.floor(s / 60)}m${pad(s % 60)}`;
	if (s < 172800) return `${sign}${Math.floor(s / 3600)}h${pad((s % 3600) / 60)}`;
	return `${sign}${Math.floor(s / 86400)}d${pad((s % 86400) / 3600)}h`;
}
const pad = (value) => String(Math.floor(value)).padStart(2, '0');

export const axisValue = (axis, value) =>
	axis === 'time' ? duration(value) : axis === 'step' ? (Math.abs(value) >= 1e6 ? count(value) : whole(value)) : count(value);

// How long ago, in one unit; '' for the last few seconds.
export function age(time) {
	const seconds = Date.now() / 1000 - time;
	return time && seconds >= 5 ? duration(Math.round(seconds)).replace(/^(\d+[mhd]).*$/, '$1') : '';
}
