package fdstore

import (
	"errors"
	"testing"
)

func FuzzParseRequest(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, descriptors int) {
		r, err := parseRequest(b, descriptors)
		if err != nil {
			var p *protocolError
			if !errors.As(err, &p) || p.status != statusInvalid && p.status != statusVersion || p.text == "" {
				t.Fatalf("got error %#v", err)
			}
			return
		}
		want := append([]byte{protocolVersion, r.op}, r.name...)
		if string(b) != string(want) {
			t.Fatalf("got request %+v of %q", r, b)
		}
		if r.op != opList && (r.name == "" || len(r.name) > MaxName) {
			t.Fatalf("got a name of %d bytes", len(r.name))
		}
		if descriptors != 0 && descriptors != 1 || (descriptors == 1) != (r.op == opPut) {
			t.Fatalf("got operation %d with %d descriptors", r.op, descriptors)
		}
	})
}

func FuzzParseLabel(f *testing.F) {
	f.Fuzz(func(t *testing.T, s string) {
		name, number := parseLabel(s)
		if s != name && s != label(name, number) {
			t.Fatalf("%q: got name %q and number %d", s, name, number)
		}
		if s == "" {
			return
		}
		if n, i := parseLabel(label(s, 7)); n != s || i != 7 {
			t.Fatalf("%q: name with number 7 gives %q and %d", s, n, i)
		}
	})
}
