package mountd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"reflect"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// FuzzDecode decodes any bytes as results of MNT and of GETPORT. The results must equal those of an
// independent decoder, and the allocated memory must be in proportion to the input.
func FuzzDecode(f *testing.F) {
	f.Add(kit.Unhex("00000000 00000005 0102030405000000 00000002 00000001 00000006"))
	f.Add(kit.Unhex("00000002"))
	f.Add(kit.Unhex("00000801"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		got, err := decodeMount(b)
		port, portErr := decodePort(b)
		runtime.ReadMemStats(&after)
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 64<<10 {
			t.Fatalf("allocated %d bytes for an input of %d", grown, len(b))
		}
		want, wantErr := referenceMount(b)
		if (wantErr == nil) != (err == nil) {
			t.Fatalf("decodeMount: got error %v, want %v", err, wantErr)
		}
		if err == nil && !reflect.DeepEqual(got, want) {
			t.Fatalf("decodeMount: got %+v, want %+v", got, want)
		}
		if valid := len(b) >= 4; (portErr == nil) != valid || valid && port != binary.BigEndian.Uint32(b) {
			t.Fatalf("decodePort: got port %d, error %v", port, portErr)
		}
	})
}

// referenceMount decodes a mountres3 with the decoder of package sunrpc.
func referenceMount(b []byte) (m mountReply, err error) {
	d := sunrpc.NewDecoder(b)
	m.stat = Stat(d.Uint32())
	if d.Err() != nil || m.stat != MNT3OK {
		return m, d.Err()
	}
	handle := d.Opaque(nfs3.FHSize)
	n := d.Uint32()
	if d.Err() != nil || len(handle) == 0 || n > maxFlavors {
		return m, sunrpc.ErrMalformed
	}
	m.flavors = make([]uint32, n)
	for i := range m.flavors {
		m.flavors[i] = d.Uint32()
	}
	m.fh, err = nfs3.NewFH(handle)
	return m, errors.Join(err, d.Err())
}

// FuzzReplies answers a call with any record. With match set, the XID is the XID of the call. The
// call must return the results of the record or an error.
func FuzzReplies(f *testing.F) {
	f.Add(true, append(sunrpc.AppendAcceptedReply(nil, 1, sunrpc.Success), 0, 0, 8, 1))
	f.Add(false, append(sunrpc.AppendAcceptedReply(nil, 1, sunrpc.Success), 0, 0, 8, 1))
	f.Add(true, sunrpc.AppendDeniedReply(nil, 1, sunrpc.AuthTooWeak))
	f.Add(true, sunrpc.AppendProgMismatchReply(nil, 1, 1, 2))
	f.Fuzz(func(t *testing.T, match bool, reply []byte) {
		if len(reply) > maxRecord {
			return
		}
		_, want, parseErr := sunrpc.ParseReply(reply)
		got, err := exchangeWith(match, reply)
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			t.Fatal("call does not end")
		case match && parseErr == nil:
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("got results %x, error %v; want results %x", got, err, want)
			}
		case err == nil && match:
			t.Fatalf("got results %x, want error %v", got, parseErr)
		}
	})
}

// exchangeWith makes a call to a server that answers with the record.
func exchangeWith(match bool, reply []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	server, conn := net.Pipe()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		defer server.Close()
		call, err := rpctcp.ReadRecord(server, nil, maxRecord)
		if err != nil {
			return
		}
		reply := bytes.Clone(reply)
		if match && len(reply) >= sunrpc.SizeUint32 {
			copy(reply, call[:sunrpc.SizeUint32])
		}
		rpctcp.WriteRecord(server, reply)
	})
	return exchange(ctx, conn, sunrpc.Message{Cred: sunrpc.AppendAuthNone(nil)})
}
