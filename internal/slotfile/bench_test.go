package slotfile

import "testing"

var benchSpecs = []TableSpec{{Name: "nodes", RecordBytes: 128, Counters: 1, MaxSlots: 1 << 20}}

func BenchmarkPut128(b *testing.B) {
	nodes := mustCreate(b, benchSpecs).Table("nodes")
	var slots [1024]Slot
	for i := range slots {
		slots[i] = mustPut(b, nodes, "record")
	}
	var record [128]byte
	b.SetBytes(int64(len(record)))
	for i := 0; b.Loop(); i++ {
		record[0] = byte(i)
		nodes.Put(slots[i%len(slots)], record[:])
	}
}

func BenchmarkAddUint64(b *testing.B) {
	nodes := mustCreate(b, benchSpecs).Table("nodes")
	var slots [1024]Slot
	for i := range slots {
		slots[i] = mustPut(b, nodes, "record")
	}
	for i := 0; b.Loop(); i++ {
		nodes.AddUint64(slots[i%len(slots)], 0, 1)
	}
}

func BenchmarkAllocPutFree128(b *testing.B) {
	nodes := mustCreate(b, benchSpecs).Table("nodes")
	var record [128]byte
	for b.Loop() {
		s, err := nodes.Alloc()
		if err != nil {
			b.Fatal(err)
		}
		nodes.Put(s, record[:])
		nodes.Free(s)
	}
}

// BenchmarkOpen opens a file with 100,000 records.
func BenchmarkOpen(b *testing.B) {
	f := mustCreate(b, benchSpecs)
	nodes := f.Table("nodes")
	for range 100000 {
		mustPut(b, nodes, "record")
	}
	d := mustDescriptor(b, f)
	f.Close()
	for b.Loop() {
		f, err := Open(d, testSchema, benchSpecs)
		if err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
}
