package front

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestRingMemoryIsAtTheSameAddress maps memory that another mapping has left.
func TestRingMemoryIsAtTheSameAddress(t *testing.T) {
	m, err := newRingMemory(1<<20, 2)
	must(t, err)
	copy(m.slot(maxEntries - 1)[slotPage:], "data")
	address, size := uintptr(unsafe.Pointer(&m.all[0])), len(m.all)
	must(t, unix.MunmapPtr(unsafe.Pointer(&m.all[0]), uintptr(size)))
	m.all = nil
	defer m.close()
	same, err := openRingMemory(m.file)
	must(t, err)
	defer same.close()
	if got := uintptr(unsafe.Pointer(&same.all[0])); got != address || len(same.all) != size {
		t.Errorf("got %d bytes at %#x, want %d at %#x", len(same.all), got, size, address)
	}
	if got := same.slot(maxEntries - 1)[slotPage:][:4]; string(got) != "data" {
		t.Errorf("content: got %q", got)
	}
	if _, err := openRingMemory(m.file); err == nil {
		t.Error("memory whose address is in use: got no error")
	}
}

func TestRingMemoryRefusesDamage(t *testing.T) {
	m, err := newRingMemory(8192, 2)
	must(t, err)
	good := *m.header()
	f := m.file
	must(t, unix.MunmapPtr(unsafe.Pointer(&m.all[0]), uintptr(len(m.all))))
	for name, damage := range map[string]func(*ringHeader){
		"magic":            func(h *ringHeader) { h.magic++ },
		"low address":      func(h *ringHeader) { h.address = 4096 },
		"odd address":      func(h *ringHeader) { h.address++ },
		"high address":     func(h *ringHeader) { h.address = ringBase + ringPlaces*ringSpace },
		"huge payload":     func(h *ringHeader) { h.payload = 1 << 62 },
		"odd payload":      func(h *ringHeader) { h.payload++ },
		"another payload":  func(h *ringHeader) { h.payload += 4096 },
		"no queues":        func(h *ringHeader) { h.queues = 0 },
		"too many queues":  func(h *ringHeader) { h.queues = maxQueues + 1 },
		"nothing (a hole)": func(h *ringHeader) { *h = ringHeader{} },
	} {
		h := good
		damage(&h)
		_, err := f.WriteAt(bytesOf(&h), 0)
		must(t, err)
		if m, err := openRingMemory(f); err == nil {
			m.close()
			t.Errorf("%s: got no error", name)
		}
	}
	_, err = f.WriteAt(bytesOf(&good), 0)
	must(t, err)
	again, err := openRingMemory(f)
	must(t, err)
	again.close()
	must(t, f.Close())
	empty, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	defer empty.Close()
	if _, err := openRingMemory(empty); err == nil {
		t.Error("empty file: got no error")
	}
}

func TestReadCPUs(t *testing.T) {
	for text, want := range map[string][]int{
		"0\n": {0}, "0-3\n": {0, 1, 2, 3}, "0-1,4,6-7\n": {0, 1, 4, 6, 7},
		"": nil, "\n": nil, "a": nil, "3-1": nil, "0,": nil, "-1": nil, "0-99999999": nil,
	} {
		path := filepath.Join(t.TempDir(), "cpus")
		must(t, os.WriteFile(path, []byte(text), 0o600))
		got, err := readCPUs(path)
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q: got %v, %v, want %v", text, got, err, want)
		}
	}
}

func TestExitSignal(t *testing.T) {
	fields := strings.Repeat(" 0", 48)
	for stat, want := range map[string]int{
		"12 (a b) R" + fields + " 9\n":      9,
		"12 (a) b) R" + fields + " 139\n":   11,
		"12 (a) R" + fields + " 256\n":      0,
		"12 (a) R 0 0\n":                    0,
		"":                                  0,
		"12 (9 9 9) R" + fields + " none\n": 0,
	} {
		if got := exitSignal([]byte(stat)); got != want {
			t.Errorf("%q: got %d, want %d", stat, got, want)
		}
	}
}
