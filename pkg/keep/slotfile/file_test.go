package slotfile

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestCreateRefusesInvalidTables(t *testing.T) {
	valid := TableSpec{Name: "a", RecordBytes: 1, MaxSlots: 1}
	with := func(change func(*TableSpec)) []TableSpec {
		s := valid
		change(&s)
		return []TableSpec{s}
	}
	large := func(n int) (all []TableSpec) {
		for i := range n {
			all = append(all, TableSpec{fmt.Sprint(i), MaxRecordBytes, MaxCounters, MaxSlots})
		}
		return all
	}
	many := func(n int) (all []TableSpec) {
		for i := range n {
			all = append(all, TableSpec{Name: fmt.Sprint(i), RecordBytes: 1, MaxSlots: 1})
		}
		return all
	}
	for _, tt := range []struct {
		name  string
		specs []TableSpec
		ok    bool
	}{
		{"smallest", []TableSpec{valid}, true},
		{"no table", nil, false},
		{"63 tables", many(63), true},
		{"64 tables", many(64), false},
		{"no name", with(func(s *TableSpec) { s.Name = "" }), false},
		{"long name", with(func(s *TableSpec) { s.Name = strings.Repeat("x", 32) }), true},
		{"too long name", with(func(s *TableSpec) { s.Name = strings.Repeat("x", 33) }), false},
		{"NUL in the name", with(func(s *TableSpec) { s.Name = "a\x00" }), false},
		{"same name", []TableSpec{valid, valid}, false},
		{"empty record", with(func(s *TableSpec) { s.RecordBytes = 0 }), false},
		{"large record", with(func(s *TableSpec) { s.RecordBytes = MaxRecordBytes }), true},
		{"too large record", with(func(s *TableSpec) { s.RecordBytes = MaxRecordBytes + 1 }), false},
		{"negative record", with(func(s *TableSpec) { s.RecordBytes = -1 }), false},
		{"negative counters", with(func(s *TableSpec) { s.Counters = -1 }), false},
		{"counters", with(func(s *TableSpec) { s.Counters = MaxCounters }), true},
		{"too many counters", with(func(s *TableSpec) { s.Counters = MaxCounters + 1 }), false},
		{"no slots", with(func(s *TableSpec) { s.MaxSlots = 0 }), false},
		{"too many slots", with(func(s *TableSpec) { s.MaxSlots = MaxSlots + 1 }), false},
		{"many slots", with(func(s *TableSpec) { s.MaxSlots = MaxSlots }), true},
		{"large file", large(1), false},
		{"largest file", large(63), false},
	} {
		f, err := Create("test", testSchema, tt.specs)
		if (err == nil) != tt.ok {
			t.Errorf("%s: got %v, want success: %v", tt.name, err, tt.ok)
		}
		if err == nil {
			f.Close()
		}
	}
}

// readAll returns the bytes of a file without locking it.
func readAll(tb testing.TB, d *os.File) []byte {
	tb.Helper()
	st, err := d.Stat()
	kit.Must(tb, err)
	b := make([]byte, st.Size())
	if _, err := d.ReadAt(b, 0); err != nil {
		tb.Fatal(err)
	}
	return b
}

func TestOpenRefusesOtherVersions(t *testing.T) {
	f := mustCreate(t, testSpecs)
	s := mustPut(t, f.Table("nodes"), "a")
	d := mustDescriptor(t, f)
	f.Close()
	with := func(change func([]TableSpec)) []TableSpec {
		specs := slices.Clone(testSpecs)
		change(specs)
		return specs
	}
	before := readAll(t, d)
	for _, tt := range []struct {
		name   string
		schema uint32
		specs  []TableSpec
	}{
		{"schema", testSchema + 1, testSpecs},
		{"schema and tables", testSchema - 1, testSpecs[:1]},
		{"fewer tables", testSchema, testSpecs[:1]},
		{"no tables", testSchema, nil},
		{"more tables", testSchema, append(slices.Clone(testSpecs), TableSpec{Name: "x", RecordBytes: 1, MaxSlots: 1})},
		{"name", testSchema, with(func(s []TableSpec) { s[1].Name = "x" })},
		{"record size", testSchema, with(func(s []TableSpec) { s[1].RecordBytes++ })},
		{"counters", testSchema, with(func(s []TableSpec) { s[0].Counters-- })},
		{"order", testSchema, with(slices.Reverse[[]TableSpec])},
	} {
		_, err := Open(d, tt.schema, tt.specs)
		var v *VersionError
		if !errors.Is(err, ErrVersion) || !errors.As(err, &v) || v.Format != formatVersion || v.Schema != testSchema {
			t.Errorf("%s: got %v, want %v with schema %d", tt.name, err, ErrVersion, testSchema)
		}
	}
	if !slices.Equal(readAll(t, d), before) {
		t.Error("Open changed the file and returned an error")
	}
	// A file of an unknown format may have any content.
	other := slices.Clone(before)
	order.PutUint32(other[atFormat:], formatVersion+1)
	clear(other[atSchema:])
	if _, err := loadCopy(other, testSpecs); !errors.Is(err, ErrVersion) {
		t.Errorf("other format: got %v, want %v", err, ErrVersion)
	}
	// The file keeps its maximum of slots.
	f = mustOpen(t, d, with(func(s []TableSpec) { s[0].MaxSlots = 1; s[1].MaxSlots = 1 << 20 }))
	if got := records(t, f.Table("nodes")); !maps.Equal(got, map[Slot]string{s: "a"}) {
		t.Errorf("records: got %v", got)
	}
	if a, b := f.Table("nodes").MaxSlots(), f.Table("locks").MaxSlots(); a != 100 || b != 3 {
		t.Errorf("maximum of slots: got %d and %d, want 100 and 3", a, b)
	}
	if f.Restarts() != 1 {
		t.Errorf("restarts: got %d, want 1", f.Restarts())
	}
}

// memfdOf returns a memfd with that content and these seals.
func memfdOf(tb testing.TB, content []byte, size int64, add int) *os.File {
	tb.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	kit.Must(tb, err)
	f := os.NewFile(uintptr(fd), "test")
	tb.Cleanup(func() { f.Close() })
	kit.Must(tb, f.Truncate(size))
	if _, err := f.WriteAt(content[:min(size, int64(len(content)))], 0); err != nil {
		tb.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, add); err != nil {
		tb.Fatal(err)
	}
	return f
}

func TestOpenRefusesOtherFiles(t *testing.T) {
	f := mustCreate(t, testSpecs)
	mustPut(t, f.Table("nodes"), "a")
	image := readAll(t, mustDescriptor(t, f))
	size := int64(len(image))
	file := func(path string) *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		kit.Must(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	r, w, err := os.Pipe()
	kit.Must(t, err)
	defer r.Close()
	defer w.Close()
	regular := file(filepath.Join(t.TempDir(), "file"))
	if _, err := regular.Write(image); err != nil {
		t.Fatal(err)
	}
	const noWrite = membuf.Sealed | unix.F_SEAL_WRITE
	for _, tt := range []struct {
		name string
		f    *os.File
		ok   bool
	}{
		{"copy", memfdOf(t, image, size, membuf.Sealed), true},
		{"regular file", regular, false},
		{"character device", file("/dev/null"), false},
		{"pipe", r, false},
		{"no seals", memfdOf(t, image, size, 0), false},
		{"may shrink", memfdOf(t, image, size, membuf.Sealed&^unix.F_SEAL_SHRINK), false},
		{"may grow", memfdOf(t, image, size, membuf.Sealed&^unix.F_SEAL_GROW), false},
		{"may be sealed", memfdOf(t, image, size, membuf.Sealed&^unix.F_SEAL_SEAL), false},
		{"not writable", memfdOf(t, image, size, noWrite), false},
		{"not writable later", memfdOf(t, image, size, membuf.Sealed|unix.F_SEAL_FUTURE_WRITE), false},
		{"empty", memfdOf(t, nil, 0, membuf.Sealed), false},
		{"zero", memfdOf(t, nil, size, membuf.Sealed), false},
		{"shorter by a byte", memfdOf(t, image, size-1, membuf.Sealed), false},
		{"shorter by a page", memfdOf(t, image, size-4096, membuf.Sealed), false},
		{"only the header", memfdOf(t, image, 4096, membuf.Sealed), false},
		{"part of the header", memfdOf(t, image, 4095, membuf.Sealed), false},
		{"longer", memfdOf(t, image, size+4096, membuf.Sealed), false},
		{"huge", memfdOf(t, image, MaxFileBytes+4096, membuf.Sealed), false},
	} {
		opened, err := Open(tt.f, testSchema, testSpecs)
		if tt.ok && err != nil || !tt.ok && !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: got %v", tt.name, err)
		}
		if err == nil {
			opened.Close()
		}
	}
	closed := file(os.DevNull)
	closed.Close()
	if _, err := Open(closed, testSchema, testSpecs); !errors.Is(err, unix.EBADF) {
		t.Errorf("closed file: got %v, want %v", err, unix.EBADF)
	}
}

// The lock belongs to the File, and not to a description that a descriptor store has.
func TestOneWriter(t *testing.T) {
	f := mustCreate(t, testSpecs)
	mustPut(t, f.Table("nodes"), "a")
	stored := mustDescriptor(t, f)
	copied, err := unix.FcntlInt(stored.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	kit.Must(t, err)
	received := os.NewFile(uintptr(copied), "received")
	defer received.Close()
	for range 3 {
		before := readAll(t, stored)
		for _, d := range []*os.File{stored, received, mustDescriptor(t, f)} {
			if _, err := Open(d, testSchema, testSpecs); !errors.Is(err, ErrLocked) {
				t.Errorf("Open of a file in use: got %v, want %v", err, ErrLocked)
			}
		}
		if !slices.Equal(readAll(t, stored), before) {
			t.Error("Open of a file in use changed the file")
		}
		kit.Must(t, f.Close())
		if f, err = Open(received, testSchema, testSpecs); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if err := f.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("second Close: got %v, want %v", err, os.ErrClosed)
	}
}
