// Which charts are shown: those of one run as the server arranged them, or of several runs, each metric by itself.

// [{key, known, charts: [{key, title, unit, metrics: [{name, label, total}], stacked, dots, raw}]}]
export function arrange(infos, search) {
	const wanted = search.trim().toLowerCase().split(/\s+/).filter(Boolean);
	const isWanted = ({ name }) => wanted.every((word) => name.toLowerCase().includes(word));
	const groups = new Map();
	for (const group of infos.flatMap((info) => info.groups).sort((a, b) => a.rank - b.rank)) {
		const charts = groups.get(group.key)?.charts ?? new Map();
		for (const chart of group.charts) {
			const metrics = chart.metrics.filter(isWanted);
			if (infos.length === 1 && metrics.length > 1) charts.set(chart.key, { ...chart, metrics });
			else for (const { name } of metrics) charts.set(name, { ...chart, key: name, title: name, metrics: [{ name, label: name }], stacked: false });
		}
		if (charts.size) groups.set(group.key, { ...group, charts });
	}
	return [...groups.values()].map((group) => ({ ...group, charts: [...group.charts.values()] }));
}
