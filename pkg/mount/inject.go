package mount

import (
	"strings"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
)

// ParseFaults reads what --inject says (see the page of package faults); nil for "". Errors name
// the word that is wrong and list those that are known.
func ParseFaults(spec string) (*faults.Plan, error) {
	if spec == "" {
		return nil, nil
	}
	p, err := faults.Parse(spec)
	if err != nil {
		return nil, control.Errorf(control.CodeUsage, "fault injection: %s", strings.TrimPrefix(err.Error(), "faults: "))
	}
	if p.Empty() {
		return nil, control.Errorf(control.CodeUsage, "fault injection: %q injects nothing; name a fault, such as disconnect-every=100, or leave it out", spec)
	}
	return p, nil
}

// WithFaults is inner with the faults of plan, or inner alone when plan is nil.
func WithFaults(inner verbs.Provider, plan *faults.Plan, log hclog.Logger) verbs.Provider {
	if plan == nil {
		return inner
	}
	return faults.New(inner, plan, log)
}

// injected counts the faults of p by name; nil when it is a provider without.
func injected(p verbs.Provider) (plan string, counts map[string]uint64) {
	f, ok := p.(*faults.Provider)
	if !ok {
		return "", nil
	}
	counts = make(map[string]uint64)
	for _, c := range f.Counts() {
		counts[c.Name] = c.Injected
	}
	return f.Plan().String(), counts
}

// PlanText is plan as text, "" for none.
func PlanText(plan *faults.Plan) string {
	if plan == nil {
		return ""
	}
	return plan.String()
}
