package bench

// A Workload is one kind of work. Its Name is unique.
type Workload struct {
	Name    string
	Callers int // threads that make calls at the same time
	run     func(*Dir, *measurement) error
}

// Names of the workloads.
const (
	Write1M     = "sequential write, 1 MiB"
	Read1M      = "sequential read, 1 MiB"
	Read4K      = "sequential read, 4 KiB"
	RandomRead  = "random read, 4 KiB"
	RandomRead4 = "random read, 4 KiB, 4 callers"
	Write4K     = "sequential write, 4 KiB"
	Create      = "create"
	Stat        = "stat"
	List        = "ls -l"
	Find        = "find"
	Unlink      = "unlink"
	Rename      = "rename"
)

// workloads are in the order in which they run: the first write makes the file of the reads, create
// the files of those that follow.
var workloads = []Workload{
	{Write1M, 1, func(d *Dir, m *measurement) error { return d.write(m, dataFile, large) }},
	{Read1M, 1, func(d *Dir, m *measurement) error { return d.read(m, large) }},
	{Read4K, 1, func(d *Dir, m *measurement) error { return d.read(m, small) }},
	{RandomRead, 1, func(d *Dir, m *measurement) error { return d.randomRead(m, 1) }},
	{RandomRead4, 4, func(d *Dir, m *measurement) error { return d.randomRead(m, 4) }},
	{Write4K, 1, func(d *Dir, m *measurement) error { return d.write(m, smallFile, small) }},
	{Create, 1, (*Dir).create},
	{Stat, 1, (*Dir).stat},
	{List, 1, func(d *Dir, m *measurement) error { return d.list(m, listBatch, true) }},
	{Find, 1, func(d *Dir, m *measurement) error { return d.list(m, -1, false) }},
	{Rename, 1, (*Dir).rename},
	{Unlink, 1, (*Dir).unlink},
}

// Workloads returns all workloads in the order in which they must run.
func Workloads() []Workload { return append([]Workload(nil), workloads...) }
