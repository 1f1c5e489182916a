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

	goxdr "github.com/rasky/go-xdr/xdr2"
	"github.com/vmware/go-nfs-client/nfs/rpc"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// oracleMount is a mountres3_ok behind its status, for the reflecting XDR that is the oracle.
type oracleMount struct {
	FH      []byte
	Flavors []uint32
}

// oracleLimit keeps the oracle, which allocates by claimed lengths, from doing so without bound.
const oracleLimit = 4096

// FuzzDecode gives the octets to each decoder as its results. What decodes must be what the oracle
// reads, or come back the same when it is encoded and decoded again; memory follows the octets, not
// the lengths in them.
func FuzzDecode(f *testing.F) {
	f.Add(unhex("00000000 00000005 0102030405000000 00000002 00000001 00000006"))
	f.Add(unhex("00000002"))
	f.Add(unhex("00000001 00000002 2f610000 00000001 00000004 68312f38 00000000 00000000"))
	f.Add(unhex("00000001 00000002 68310000 00000002 2f610000 00000000"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		stat, res, err := decodeMount(b)
		exports, exportsErr := decodeExports(b)
		entries, entriesErr := decodeDump(b)
		runtime.ReadMemStats(&after)
		// An empty name of 12 octets is an Export of 40, and appending doubles.
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 64<<10+64*uint64(len(b)) {
			t.Fatalf("%d octets were allocated for %d", grown, len(b))
		}
		if len(b) >= 4 && stat == MNT3OK {
			var o oracleMount
			_, oracleErr := goxdr.UnmarshalLimited(bytes.NewReader(b[4:]), &o, oracleLimit)
			good := oracleErr == nil && len(o.FH) > 0 && len(o.FH) <= nfs3.FHSize && len(o.Flavors) <= maxFlavors
			if good != (err == nil) {
				t.Fatalf("error %v; the oracle: %+v, error %v", err, o, oracleErr)
			}
			if good && (!bytes.Equal(res.FH.Bytes(), o.FH) || len(res.AuthFlavors) != len(o.Flavors) ||
				len(o.Flavors) > 0 && !reflect.DeepEqual(res.AuthFlavors, o.Flavors)) {
				t.Fatalf("result %+v, the oracle's %+v", res, o)
			}
		}
		if exportsErr == nil {
			again, err := decodeExports(encodeExports(exports))
			if err != nil || !reflect.DeepEqual(again, exports) || len(encodeExports(exports)) > len(b) {
				t.Fatalf("exports %q again %q, error %v", exports, again, err)
			}
		}
		if entriesErr == nil {
			again, err := decodeDump(encodeDump(entries))
			if err != nil || !reflect.DeepEqual(again, entries) || len(encodeDump(entries)) > len(b) {
				t.Fatalf("mounts %q again %q, error %v", entries, again, err)
			}
		}
	})
}

func encodeExports(list []Export) (b []byte) {
	for _, e := range list {
		b = sunrpc.AppendString(sunrpc.AppendBool(b, true), e.Dir)
		for _, g := range e.Groups {
			b = sunrpc.AppendString(sunrpc.AppendBool(b, true), g)
		}
		b = sunrpc.AppendBool(b, false)
	}
	return sunrpc.AppendBool(b, false)
}

func encodeDump(list []Entry) (b []byte) {
	for _, e := range list {
		b = sunrpc.AppendString(sunrpc.AppendString(sunrpc.AppendBool(b, true), e.Host), e.Dir)
	}
	return sunrpc.AppendBool(b, false)
}

// FuzzReplies is a server that answers the port mapper's and MOUNT's calls with any record, whose
// XID is the call's when match is set. Each call ends, without a panic, in an error of this package
// or in what the record says.
func FuzzReplies(f *testing.F) {
	f.Add(true, append(sunrpc.AppendAcceptedReply(nil, 1, sunrpc.Success), 0, 0, 8, 1))
	f.Add(false, append(sunrpc.AppendAcceptedReply(nil, 1, sunrpc.Success), 0, 0, 8, 1))
	f.Add(true, sunrpc.AppendDeniedReply(nil, 1, sunrpc.AuthTooWeak))
	f.Add(true, sunrpc.AppendProgMismatchReply(nil, 1, 1, 2))
	f.Fuzz(func(t *testing.T, match bool, reply []byte) {
		if len(reply) > maxRecord {
			return
		}
		_, results, parseErr := sunrpc.ParseReply(reply)
		good := match && parseErr == nil

		var port int
		err := answer(match, reply, func(c *rpc.Client) (err error) {
			m := rpc.Portmapper{Client: c}
			port, err = m.Getport(rpc.Mapping{Prog: 1, Vers: 2, Prot: rpc.IPProtoTCP})
			return err
		})
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			t.Fatal("GETPORT hangs")
		case err == nil && (!good || len(results) < 4 || port != int(binary.BigEndian.Uint32(results))):
			if match || len(reply) < 4 { // else the XIDs may be equal by chance
				t.Fatalf("port %d of results %x, parsed with %v", port, results, parseErr)
			}
		case err != nil && good && len(results) >= 4:
			t.Fatalf("error %v; results %x", err, results)
		}
	})
}

// answer has use make calls to a server that answers each with the record.
func answer(match bool, reply []byte, use func(*rpc.Client) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	server, peer := net.Pipe()
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() {
		defer server.Close()
		for {
			call, err := rpctcp.ReadRecord(server, nil, maxRecord)
			if err != nil {
				return
			}
			own := append([]byte(nil), reply...)
			if match && len(own) >= 4 {
				copy(own, call[:4])
			}
			if rpctcp.WriteRecord(server, own) != nil {
				return
			}
		}
	})
	return through(ctx, peer, use)
}
