package mount

import (
	"strings"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
)

// ParseFaults parses the value of --inject (see package faults) and returns nil for "". An error
// names the unknown word and lists the known ones.
func ParseFaults(spec string) (*faults.Plan, error) {
	if spec == "" {
		return nil, nil
	}
	p, err := faults.Parse(spec)
	if err != nil {
		return nil, control.Errorf(control.CodeUsage, "fault injection: %s",
			strings.TrimPrefix(err.Error(), "faults: "))
	}
	if p.Empty() {
		return nil, control.Errorf(control.CodeUsage, "fault injection: %q injects nothing; "+
			"name a fault such as disconnect-every=100, or remove the option", spec)
	}
	return p, nil
}

// WithFaults returns a provider that injects the faults of plan into inner. It returns inner if
// plan is nil.
func WithFaults(inner verbs.Provider, plan *faults.Plan, log hclog.Logger) verbs.Provider {
	if plan == nil {
		return inner
	}
	return faults.New(inner, plan, log)
}

// PlanText returns plan as text; "" if plan is nil.
func PlanText(plan *faults.Plan) string {
	if plan == nil {
		return ""
	}
	return plan.String()
}

// injected returns the plan of p and its injected faults by name. Both are empty if p injects none.
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
