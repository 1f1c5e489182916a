package knfsd

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

var _ = register("split", "an FPDU split in its trailer: accepted without CRC; "+
	"with CRC the connection ends and the copy succeeds", testSplit)

// Positions of the lengths in an FPDU and in an MPA Request (RFC 5044 §4.2 and §7.1).
const (
	mpaRequestHdr = 20
	mpaPrivateLen = 18
	fpduLen       = 2
	fpduAlign     = 4
	fpduCRC       = 4
)

const (
	splitAt    = 20 // number of the split FPDU, in the first RDMA Read Response
	splitPause = 200 * time.Millisecond
)

// splitTrailer relays TCP connections to a server until the test ends. It delays the last two bytes
// of one FPDU, so that TCP splits the FPDU there.
func splitTrailer(t *testing.T, server netip.AddrPort) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	work.Go(func() {
		for first := true; ; first = false {
			client, err := l.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", server.String())
			if err != nil {
				t.Error(err)
				client.Close()
				continue
			}
			at := 0
			if first {
				at = splitAt
			}
			work.Go(func() {
				forwardFPDUs(to, client, at)
				to.(*net.TCPConn).CloseWrite()
			})
			work.Go(func() {
				// Without the wrappers the kernel copies through pipes that the Go runtime keeps
				// open, and the leak check counts these pipes.
				io.Copy(struct{ io.Writer }{client}, struct{ io.Reader }{to})
				client.Close()
				to.Close()
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		work.Wait()
	})
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// forwardFPDUs copies an initiator's bytes, frame by frame, until either end closes, and splits
// FPDU number split.
func forwardFPDUs(to io.Writer, from io.Reader, split int) {
	r := bufio.NewReaderSize(from, 128<<10)
	request, err := r.Peek(mpaRequestHdr)
	if err != nil {
		return
	}
	size := mpaRequestHdr + int(binary.BigEndian.Uint16(request[mpaPrivateLen:]))
	for n := 0; ; n++ {
		frame := make([]byte, size)
		if _, err := io.ReadFull(r, frame); err != nil {
			return
		}
		if n == split && n > 0 {
			if _, err := to.Write(frame[:size-2]); err != nil {
				return
			}
			time.Sleep(splitPause)
			frame = frame[size-2:]
		}
		if _, err := to.Write(frame); err != nil {
			return
		}
		head, err := r.Peek(fpduLen)
		if err != nil {
			return
		}
		size = fpduLen + int(binary.BigEndian.Uint16(head))
		size += -size&(fpduAlign-1) + fpduCRC
	}
}

// testSplit shows why CRCs are off by default: a stock siw ends a connection with CRCs when TCP
// splits the last bytes of an FPDU, which TCP may do. With CRCs on, no data is lost either.
func testSplit(t *testing.T, b bench) {
	file := randomFile(t, 1<<20)
	for _, crc := range []bool{false, true} {
		b.crc = crc
		addr := splitTrailer(t, b.RDMA)
		m := b.mount(t, func(c *xprt.Config) { c.Addr, c.ReconnectMin = addr, 100*time.Millisecond })
		run(t, "", "cp", file, filepath.Join(m.dir, "split"))
		if got, want := b.serverSum(t, "split"), sum(t, file); got != want {
			t.Errorf("CRC %v: got a file with sum %s on the server, want %s", crc, got, want)
		}
		st := m.tr.Stats()
		t.Logf("CRC %v: %d connections; %s", crc, st.Connects, st.LastError)
		switch {
		case !crc && st.Connects != 1:
			t.Errorf("CRC off: got %d connections, want 1; last error: %s", st.Connects, st.LastError)
		case crc && (st.Connects < 2 || st.Resends == 0 || !strings.Contains(st.LastError, "CRC error")):
			t.Errorf("CRC on: got %d connections, %d resends, last error %s; want a CRC error", st.Connects,
				st.Resends, st.LastError)
		}
	}
}
